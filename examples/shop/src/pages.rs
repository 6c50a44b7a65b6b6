//! The pages of the outbox: at `/admin/outbox` for staff of the shop, and at `/webhooks` for its customers.

use std::time::Duration;

use diesel_outbox_pages::{Rights, Visitor, serve};
use rouille::input::basic_http_auth;
use rouille::{Request, Response, ResponseBody};
use uuid::Uuid;

use crate::{AnyError, Shop};

pub const ADMIN: &str = "/admin/outbox";
pub const PORTAL: &str = "/webhooks";
const HOUR: Duration = Duration::from_secs(3600);

pub fn for_staff(shop: &Shop, request: &Request) -> Result<Response, AnyError> {
    let Some(name) = staff(shop, request) else {
        return Ok(login_required());
    };
    let visitor = Visitor::known(name, Rights::all()).from_peer(request.remote_addr().ip());
    answer(request, |asked| shop.pages.respond(asked, visitor))
}

/// The portal itself knows those who opened a link.
pub fn for_customers(shop: &Shop, request: &Request) -> Result<Response, AnyError> {
    let visitor = Visitor::unknown(request.remote_addr().ip());
    answer(request, |asked| shop.portal.respond(asked, visitor))
}

fn answer(
    request: &Request,
    respond: impl FnOnce(http::Request<Vec<u8>>) -> http::Response<Vec<u8>>,
) -> Result<Response, AnyError> {
    let body = request.data().ok_or("the body was read before")?;
    let (method, target) = (request.method(), request.raw_url());
    let (status_code, headers, body) = serve(method, target, request.headers(), body, respond);
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

/// The path that opens the portal for a customer. Staff gives it to the customer.
pub fn link(shop: &Shop, request: &Request, customer: Uuid) -> Response {
    match staff(shop, request) {
        Some(_) => Response::text(shop.portal.link(customer, HOUR)),
        None => login_required(),
    }
}

/// The name of somebody of the staff.
fn staff(shop: &Shop, request: &Request) -> Option<String> {
    let login = basic_http_auth(request)?;
    (login.password == shop.password).then_some(login.login)
}

fn login_required() -> Response {
    Response::basic_http_auth_login_required("shop")
}
