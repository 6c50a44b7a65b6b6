//! A shop on Rocket. Each order and its message are written in one transaction on a connection of the pool, and
//! the relay runs inside the server. Another part of the shop receives the messages over HTTP and ships.
//!
//! ```sh
//! export ADMIN_PASSWORD=$(openssl rand -hex 16)
//! scripts/with-postgres cargo run --manifest-path examples/rocket-shop/Cargo.toml
//! curl --json '{"euro": 42}' http://127.0.0.1:8000/orders
//! curl http://127.0.0.1:8000/shipments
//! open http://127.0.0.1:8000/admin/outbox # any name, with the password in ADMIN_PASSWORD
//! # The path of a customer's portal, whose webhooks get the orders with this `customer`:
//! curl -u ann:$ADMIN_PASSWORD -X POST http://127.0.0.1:8000/customers/$(uuidgen)/webhooks
//! ```
//!
//! Nothing blocks the async runtime of Rocket: enqueueing runs on the threads of the pool, and the relay has its own
//! threads. Ctrl-C or SIGTERM stops both; messages not yet sent are sent after the next start.

mod orders;
mod pages;
mod relay;
mod shipments;
mod staff;

use std::error::Error;
use std::sync::Arc;

use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel_outbox::Outbox;
use diesel_outbox::config;
use diesel_outbox_pages::Pages;
use rocket::error::ErrorKind;
use rocket::fairing::AdHoc;
use rocket::{Build, Rocket, catchers, error, routes, warn};
use rocket_sync_db_pools::database;
use secrecy::ExposeSecret;

use crate::pages::Mounted;
use crate::relay::RelayFairing;
use crate::staff::Password;

#[database("shop")]
pub struct Db(PgConnection);

#[rocket::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let config = config::from_env()?;
    let database_url = config.database_url()?;
    let figment = rocket::Config::figment()
        .merge(("databases.shop.url", database_url.expose_secret()))
        // The receiver must accept whatever the outbox accepts: payloads of up to 1 MiB.
        .merge(("limits.bytes", "2MiB"));
    let pages = Pages::operators(&config, database_url, None)?.base("/admin/outbox")?;
    let portal = Pages::portal(&config, database_url)?.base("/webhooks");
    let portal = Arc::new(portal.name("Shop"));
    let password = std::env::var("ADMIN_PASSWORD").map_err(|_| "set ADMIN_PASSWORD")?;
    let relay = RelayFairing::new(config);
    let launched = rocket::custom(figment)
        .manage(Outbox::new("outbox")?)
        .mount(
            "/",
            routes![orders::place, shipments::take, shipments::list, staff::link],
        )
        .manage(Password(password))
        .register("/", catchers![staff::login_required])
        .mount("/admin/outbox", Mounted::ForStaff(Arc::new(pages)))
        .manage(Arc::clone(&portal))
        .mount("/webhooks", Mounted::ForCustomers(portal))
        .attach(Db::fairing())
        .attach(AdHoc::try_on_ignite("migrations", migrate))
        .attach(relay.clone())
        .launch()
        .await;
    // Depending on when the signal arrives, Rocket 0.5 ends without calling its shutdown fairings.
    relay.end().await;
    match launched {
        // Rocket also reports this error for connections that are still open. They lose no message.
        Err(error) if matches!(error.kind(), ErrorKind::Shutdown(_, None)) => {
            warn!("connections were still open at shutdown");
            Ok(())
        }
        launched => Ok(launched.map(drop)?),
    }
}

async fn migrate(rocket: Rocket<Build>) -> rocket::fairing::Result {
    let Some(db) = Db::get_one(&rocket).await else {
        return Err(rocket);
    };
    match db.run(create_tables).await {
        Ok(()) => Ok(rocket),
        Err(error) => {
            error!("migrations: {error}");
            Err(rocket)
        }
    }
}

fn create_tables(conn: &mut PgConnection) -> Result<(), Box<dyn Error + Send + Sync>> {
    diesel_outbox::migrate(conn, &"outbox".parse()?)?;
    // An application would create these tables with its own migrations.
    conn.batch_execute(
        "CREATE TABLE IF NOT EXISTS orders (
             id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
             euro int NOT NULL
         );
         CREATE TABLE IF NOT EXISTS shipments (
             id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
             order_id int NOT NULL
         )",
    )?;
    Ok(())
}
