//! The pages of the outbox at `/admin/outbox`, for staff of the shop.

use std::io::Read;

use diesel_outbox_pages::{Pages, Rights, Visitor, plain};
use http::StatusCode;
use rouille::input::basic_http_auth;
use rouille::{Request, Response, ResponseBody};

use crate::{AnyError, Shop};

pub const BASE: &str = "/admin/outbox";
/// The largest form.
const MOST_BYTES: u64 = 256 * 1024;

pub fn show(shop: &Shop, pages: &Pages, request: &Request) -> Result<Response, AnyError> {
    let Some(staff) = basic_http_auth(request).filter(|one| one.password == shop.password) else {
        return Ok(Response::basic_http_auth_login_required("shop"));
    };
    let mut body = Vec::new();
    let data = request.data().ok_or("the body was read before")?;
    data.take(MOST_BYTES + 1).read_to_end(&mut body)?;
    if body.len() as u64 > MOST_BYTES {
        return Ok(answer(plain(StatusCode::PAYLOAD_TOO_LARGE, "too large\n")));
    }
    let mut asked = http::Request::builder()
        .method(request.method())
        .uri(request.raw_url());
    for (name, value) in request.headers() {
        asked = asked.header(name, value);
    }
    let visitor = Visitor::known(staff.login, Rights::all()).from_peer(request.remote_addr().ip());
    Ok(answer(pages.respond(asked.body(body)?, visitor)))
}

fn answer(response: http::Response<Vec<u8>>) -> Response {
    let (head, body) = response.into_parts();
    let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let headers = head.headers.iter();
    Response {
        status_code: head.status.as_u16(),
        headers: headers
            .map(|(name, value)| (name.to_string().into(), text(value).into()))
            .collect(),
        data: ResponseBody::from_data(body),
        upgrade: None,
    }
}
