//! A shop on rouille. Each order and its message are written in one transaction on a connection of the pool, and
//! the relay runs inside the process. Another part of the shop receives the messages over HTTP, verifies that they
//! come from the shop, and ships each order once.
//!
//! ```sh
//! export WEBHOOK_SECRET=whsec_$(openssl rand -base64 32) ADMIN_PASSWORD=$(openssl rand -hex 16)
//! scripts/with-postgres cargo run --manifest-path examples/shop/Cargo.toml
//! curl --json '{"euro": 42}' http://127.0.0.1:8000/orders
//! curl http://127.0.0.1:8000/shipments
//! open http://127.0.0.1:8000/admin/outbox # any name, with the password in ADMIN_PASSWORD
//! # The path of a customer's portal, whose webhooks get the orders with this `customer`:
//! curl -u ann:$ADMIN_PASSWORD -X POST http://127.0.0.1:8000/customers/$(uuidgen)/webhooks
//! ```
//!
//! Ctrl-C or SIGTERM stops the shop; messages not yet sent are sent after the next start. With `RUST_LOG=debug`
//! the shop logs each message.

mod orders;
mod pages;
mod shipments;

use std::error::Error;
use std::time::Duration;

use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_outbox::config::{self, Mode, SigningSecret};
use diesel_outbox::receive::Verifier;
use diesel_outbox::{Destination, Outbox, Relay};
use diesel_outbox_pages::{Pages, Portal};
use rouille::{Request, Response, Server, router};
use secrecy::ExposeSecret;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use uuid::Uuid;

type AnyError = Box<dyn Error + Send + Sync>;

/// The state shared by all requests.
struct Shop {
    pool: Pool<ConnectionManager<PgConnection>>,
    outbox: Outbox,
    verifier: Verifier,
    pages: Pages,
    portal: Portal,
    /// Of the staff.
    password: String,
}

fn main() -> Result<(), AnyError> {
    // Without a logger, dead letters would go unnoticed.
    env_logger::init();
    let config = config::from_env()?;
    let secret: SigningSecret = variable("WEBHOOK_SECRET")?.parse()?;
    let port = std::env::var("PORT").unwrap_or_else(|_| "8000".to_owned());
    // Install the handlers before the first thread starts, so that no signal kills the process.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;

    let database_url = config.database_url()?.expose_secret();
    let pool = Pool::new(ConnectionManager::new(database_url))?;
    let (staff, customers) = (pool.clone(), pool.clone());
    let shop = Shop {
        pool,
        outbox: Outbox::new("outbox")?,
        verifier: Verifier::new(std::slice::from_ref(&secret))?,
        pages: Pages::operators(&config, move || staff.get(), None)?.base(pages::ADMIN)?,
        portal: Pages::portal(&config, move || customers.get())?.base(pages::PORTAL),
        password: variable("ADMIN_PASSWORD")?,
    };
    create_tables(&shop)?;

    let server = Server::new(format!("127.0.0.1:{port}"), move |request| {
        answer(&shop, request)
    })?;
    let address = server.server_addr();
    std::thread::spawn(move || server.run());

    let mut shipping = Destination::new("shipping", &format!("http://{address}/events"))?;
    shipping.secrets = vec![secret];
    // Headers are not signed, so structured mode puts all attributes into the signed body.
    shipping.policy.mode = Some(Mode::Structured);
    let relay = Relay::from_config(config)
        .destination(shipping)
        .route("order.*", "shipping")
        // Threads for the webhooks of customers.
        .endpoint_threads(4)
        .start()?;
    println!("the shop has launched from http://{address}");

    signals.forever().next();
    relay.shutdown(Duration::from_secs(30))?;
    // A request cut off here has committed its order with its message, or neither.
    Ok(())
}

fn variable(name: &str) -> Result<String, AnyError> {
    std::env::var(name).map_err(|_| format!("set {name}: see the comment in src/main.rs").into())
}

fn create_tables(shop: &Shop) -> Result<(), AnyError> {
    let mut conn = shop.pool.get()?;
    diesel_outbox::migrate(&mut conn, shop.outbox.name())?;
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

fn answer(shop: &Shop, request: &Request) -> Response {
    let answer = router!(request,
        (POST) (/orders) => { orders::place(shop, request) },
        (POST) (/events) => { shipments::receive(shop, request) },
        (GET) (/shipments) => { shipments::list(shop) },
        (POST) (/customers/{customer: Uuid}/webhooks) => { Ok(pages::link(shop, request, customer)) },
        _ => match request.url() {
            url if url.starts_with(pages::ADMIN) => pages::for_staff(shop, request),
            url if url.starts_with(pages::PORTAL) => pages::for_customers(shop, request),
            _ => Ok(Response::empty_404()),
        }
    );
    answer.unwrap_or_else(|error| {
        log::error!("{} {}: {error}", request.method(), request.url());
        // 503 makes the relay retry.
        Response::text("not now").with_status_code(503)
    })
}
