//! The actions of customers on their webhooks. A webhook is a registered destination whose tenant is the customer.

use std::time::Duration;

use diesel::{Connection, PgConnection};
use diesel_outbox::destinations::{
    DeliveryFilter, DestinationError, DestinationFilter, Destinations, RegisteredDestination,
};
use rouille::{Request, Response, post_input};
use secrecy::ExposeSecret;
use uuid::Uuid;

use crate::orders::TOPICS;
use crate::{AnyError, Shop, pages};

/// Webhooks per customer.
const MOST: usize = 10;
const LONGEST_DESCRIPTION: usize = 200;
const PAGE: usize = 20;
/// How long the old secret signs alongside a new secret.
const OVERLAP: Duration = Duration::from_secs(24 * 3600);

fn destinations(shop: &Shop) -> Destinations<'_> {
    let keys = &shop.config.secret_keys;
    shop.outbox.destinations().with_keys(keys)
}

fn of_customer(
    shop: &Shop,
    conn: &mut PgConnection,
    customer: Uuid,
) -> Result<Vec<RegisteredDestination>, DestinationError> {
    let filter = DestinationFilter::default().tenant_id(customer);
    destinations(shop).list(conn, &filter, MOST)
}

pub fn list(shop: &Shop, customer: Uuid) -> Result<Response, AnyError> {
    let hooks = of_customer(shop, &mut *shop.pool.get()?, customer)?;
    Ok(pages::list(&hooks, hooks.len() < MOST))
}

pub fn register(shop: &Shop, customer: Uuid, request: &Request) -> Result<Response, AnyError> {
    let input = post_input!(request, {
        url: String,
        description: String,
        topics: Vec<String>,
        from_euro: Option<u32>,
    });
    let Ok(form) = input else {
        return Ok(Response::empty_400());
    };
    let refused = |why: &str| Ok(pages::message("Not registered", why).with_status_code(422));
    if form.topics.is_empty() || form.topics.iter().any(|topic| !TOPICS.contains(&&**topic)) {
        return refused("choose at least one event");
    }
    if form.description.len() > LONGEST_DESCRIPTION {
        return refused("the description is too long");
    }
    // The shop chooses the names, because the webhooks of all customers share one table.
    let name = Uuid::now_v7().to_string();
    let mut hook = RegisteredDestination::new(&name, form.url.trim())
        .tenant(customer)
        .topics(form.topics)
        .description(form.description.trim());
    if let Some(euro) = form.from_euro {
        // Build the filter from a number: a filter written by the customer could burden the database.
        hook = hook.filter(format!("$.euro ? (@ >= {euro})"));
    }
    let mut conn = shop.pool.get()?;
    if of_customer(shop, &mut conn, customer)?.len() >= MOST {
        return refused("you have reached the limit: remove one first");
    }
    let registered = conn.transaction(|conn| {
        destinations(shop).put(conn, &hook)?;
        // Register only a URL that the relay would use. The settings say whether https is required.
        destinations(shop).test(conn, &name, &shop.config).map(drop)
    });
    match registered {
        Ok(()) => Ok(Response::redirect_303(format!("/webhooks/{name}"))),
        Err(error @ (DestinationError::Invalid(_) | DestinationError::Refused(_))) => {
            refused(&error.public_error())
        }
        Err(error) => Err(error.into()),
    }
}

/// A webhook, if it belongs to this customer.
fn find(
    shop: &Shop,
    conn: &mut PgConnection,
    customer: Uuid,
    name: &str,
) -> Result<Option<RegisteredDestination>, DestinationError> {
    let found = destinations(shop).get(conn, name)?;
    Ok(found.filter(|hook| hook.tenant_id == Some(customer)))
}

pub fn show(
    shop: &Shop,
    customer: Uuid,
    name: &str,
    request: &Request,
) -> Result<Response, AnyError> {
    let conn = &mut *shop.pool.get()?;
    let Some(hook) = find(shop, conn, customer, name)? else {
        return Ok(Response::empty_404());
    };
    let after = request.get_param("after");
    let Ok(after) = after.map(|place| place.parse()).transpose() else {
        return Ok(Response::empty_400());
    };
    let secret = destinations(shop).secret(conn, name)?;
    let secret = secret.map(|secret| secret.written().expose_secret().to_owned());
    let filter = DeliveryFilter::default().after(after);
    let deliveries = destinations(shop).deliveries(conn, name, &filter, PAGE)?;
    Ok(pages::webhook(
        &hook,
        secret.as_deref().unwrap_or_default(),
        &deliveries,
    ))
}

/// Carries out the action of a button.
pub fn act(
    shop: &Shop,
    customer: Uuid,
    name: &str,
    action: &str,
    request: &Request,
) -> Result<Response, AnyError> {
    let mut conn = shop.pool.get()?;
    if find(shop, &mut conn, customer, name)?.is_none() {
        return Ok(Response::empty_404());
    }
    let destinations = destinations(shop);
    match action {
        "rotate" => destinations.rotate(&mut conn, name, OVERLAP).map(drop)?,
        "enable" => destinations.enable(&mut conn, name).map(drop)?,
        "disable" => {
            let why = "disabled by the customer";
            destinations.disable(&mut conn, name, why).map(drop)?;
        }
        "remove" => {
            destinations.remove(&mut conn, name)?;
            return Ok(Response::redirect_303("/"));
        }
        "test" => {
            let test = destinations.test(&mut conn, name, &shop.config)?;
            // A response can take seconds, so return the connection first.
            drop(conn);
            return Ok(
                test.map_or_else(Response::empty_404, |test| pages::test(name, &test.send()))
            );
        }
        "again" => {
            let form = post_input!(request, { message_id: String });
            let id = form.ok().and_then(|form| form.message_id.parse().ok());
            let Some(message_id) = id else {
                return Ok(Response::empty_400());
            };
            match destinations.send_again(&mut conn, name, message_id) {
                Ok(true) => {}
                Ok(false) => return Ok(Response::empty_404()),
                Err(DestinationError::PayloadNotKept { .. }) => {
                    return Ok(pages::message("Not sent", "the payload was not kept")
                        .with_status_code(409));
                }
                Err(error) => return Err(error.into()),
            }
        }
        _ => return Ok(Response::empty_404()),
    }
    Ok(Response::redirect_303(format!("/webhooks/{name}")))
}
