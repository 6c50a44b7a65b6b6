//! A shop whose customers register webhooks: see README.md.

mod orders;

use std::error::Error;
use std::time::Duration;

use diesel::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::sql_types::{Integer, Text};
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};
use diesel_outbox::config::LedgerPayload;
use diesel_outbox::{Outbox, Relay, config};
use diesel_outbox_pages::{Pages, Portal, Rights, Visitor, serve};
use rouille::{Request, Response, ResponseBody, Server, input, router};
use secrecy::ExposeSecret;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use uuid::Uuid;

pub type AnyError = Box<dyn Error + Send + Sync>;

const LONGEST_FORM: usize = 16 * 1024;
/// Webhooks per customer.
const MOST: i32 = 10;
const MIGRATIONS: EmbeddedMigrations = embed_migrations!();

diesel::table! {
    customers (id) {
        id -> Uuid,
        name -> Text,
        password -> Text,
    }
}

/// The state shared by all requests.
pub struct Shop {
    pub pool: Pool<ConnectionManager<PgConnection>>,
    pub outbox: Outbox,
    pub portal: Portal,
}

fn main() -> Result<(), AnyError> {
    env_logger::init();
    let mut config = config::from_env()?;
    // Keep payloads in the ledger, so that delivered messages can be sent again.
    config.ledger_payload = LedgerPayload::WithEntry;
    let database_url = config.database_url()?.expose_secret().to_owned();
    // Install the handlers before the first thread starts, so that no signal kills the process.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let pool = Pool::new(ConnectionManager::new(&database_url))?;
    let shop = Shop {
        pool: pool.clone(),
        outbox: Outbox::new(&config.table.to_string())?,
        portal: Pages::portal(&config, move || pool.get())?
            .base("/webhooks")
            .name("Shop")
            .topics(&orders::events()),
    };
    migrate(&shop)?;
    let relay = Relay::from_config(config).endpoint_threads(16).start()?;
    let port = std::env::var("PORT").unwrap_or_else(|_| "8000".to_owned());
    let server = Server::new(format!("127.0.0.1:{port}"), move |request| {
        answer(&shop, request)
    })?;
    println!("the shop has launched from http://{}", server.server_addr());
    std::thread::spawn(move || server.run());

    signals.forever().next();
    relay.shutdown(Duration::from_secs(30))?;
    Ok(())
}

/// Creates the tables of the outbox and the shop, and the customers: `CUSTOMERS=name:password,name:password`.
fn migrate(shop: &Shop) -> Result<(), AnyError> {
    let mut conn = shop.pool.get()?;
    diesel_outbox::migrate(&mut conn, shop.outbox.name())?;
    conn.run_pending_migrations(MIGRATIONS)?;
    diesel::sql_query("SELECT outbox_endpoint_limit($1, $2)")
        .bind::<Text, _>(shop.outbox.name().to_string())
        .bind::<Integer, _>(MOST)
        .execute(&mut conn)?;
    let listed = std::env::var("CUSTOMERS").unwrap_or_default();
    for (name, password) in listed.split(',').filter_map(|one| one.split_once(':')) {
        diesel::insert_into(customers::table)
            .values((customers::name.eq(name), customers::password.eq(password)))
            .on_conflict_do_nothing()
            .execute(&mut conn)?;
    }
    Ok(())
}

fn answer(shop: &Shop, request: &Request) -> Response {
    route(shop, request).unwrap_or_else(|error| {
        log::error!("{} {}: {error}", request.method(), request.url());
        Response::text("not now").with_status_code(503)
    })
}

fn route(shop: &Shop, request: &Request) -> Result<Response, AnyError> {
    let url = request.url();
    let is_portal = url == "/webhooks" || url.starts_with("/webhooks/");
    let authorization = request.header("authorization").unwrap_or_default();
    if is_portal && authorization.starts_with("Bearer ") {
        // Programs of customers have a token of the portal or of a feed, which the portal knows.
        return portal(shop, request, Visitor::unknown(request.remote_addr().ip()));
    }
    let Some(customer) = customer(shop, request)? else {
        return Ok(Response::basic_http_auth_login_required("webhooks"));
    };
    if request.method() == "POST" {
        // Browsers send the login automatically, even with forms from other sites.
        let host = |origin: &str| origin.split_once("://").map(|(_, host)| host.to_owned());
        if request
            .header("origin")
            .is_some_and(|origin| host(origin).as_deref() != request.header("host"))
        {
            return Ok(
                Response::text("refused: this form comes from another site").with_status_code(403)
            );
        }
        let length = request
            .header("content-length")
            .and_then(|length| length.parse().ok());
        if length.is_none_or(|length: usize| length > LONGEST_FORM) {
            return Ok(Response::text("refused: this form is too long").with_status_code(413));
        }
    }
    if is_portal {
        let visitor = Visitor::of_tenant(customer, "the customer", Rights::all());
        return portal(shop, request, visitor);
    }
    router!(request,
        (GET) (/) => { Ok(Response::html(include_str!("order.html"))) },
        (GET) (/events) => { Ok(Response::text(orders::events().markdown())) },
        (POST) (/orders) => { orders::place(shop, customer, request) },
        _ => Ok(Response::empty_404())
    )
}

/// The pages about webhooks, for the customer of this visitor only.
fn portal(shop: &Shop, request: &Request, visitor: Visitor) -> Result<Response, AnyError> {
    let body = request.data().ok_or("the body was read before")?;
    let (method, target) = (request.method(), request.raw_url());
    let (status_code, headers, body) = serve(method, target, request.headers(), body, |asked| {
        shop.portal.respond(asked, visitor)
    });
    let headers = headers.into_iter();
    Ok(Response {
        status_code,
        headers: headers
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
        data: ResponseBody::from_data(body),
        upgrade: None,
    })
}

/// The customer who sent the request. The id of the customer is the tenant of messages and webhooks.
fn customer(shop: &Shop, request: &Request) -> Result<Option<Uuid>, AnyError> {
    let Some(login) = input::basic_http_auth(request) else {
        return Ok(None);
    };
    let found = customers::table
        .filter(customers::name.eq(login.login))
        .filter(customers::password.eq(login.password))
        .select(customers::id)
        .first(&mut shop.pool.get()?)
        .optional()?;
    Ok(found)
}
