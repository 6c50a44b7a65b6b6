//! The pages of the outbox at `/admin/outbox`, for staff of the shop.

use diesel_outbox_pages::{Pages, Rights, Visitor, serve};
use rouille::input::basic_http_auth;
use rouille::{Request, Response, ResponseBody};

use crate::{AnyError, Shop};

pub const BASE: &str = "/admin/outbox";

pub fn show(shop: &Shop, pages: &Pages, request: &Request) -> Result<Response, AnyError> {
    let Some(staff) = basic_http_auth(request).filter(|one| one.password == shop.password) else {
        return Ok(Response::basic_http_auth_login_required("shop"));
    };
    let visitor = Visitor::known(staff.login, Rights::all()).from_peer(request.remote_addr().ip());
    let body = request.data().ok_or("the body was read before")?;
    let (method, target) = (request.method(), request.raw_url());
    let (status_code, headers, body) = serve(method, target, request.headers(), body, |asked| {
        pages.respond(asked, visitor)
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
