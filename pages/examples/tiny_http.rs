//! The pages at `/admin/outbox` of an application on tiny_http, behind the login of the application.
//!
//! ```sh
//! export ADMIN_LOGIN="Basic $(printf 'ann:secret' | base64)"
//! scripts/with-postgres cargo run -p diesel-outbox-pages --example tiny_http
//! open http://ann:secret@127.0.0.1:8000/admin/outbox
//! ```

use std::error::Error;
use std::io::Read;

use diesel_outbox_pages::{Pages, Rights, Visitor, plain};
use tiny_http::{Header, Request, Response, Server};

/// The largest form.
const MOST_BYTES: u64 = 256 * 1024;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let login = std::env::var("ADMIN_LOGIN")?;
    let pages = Pages::operators(&diesel_outbox::config::from_env()?, None)?;
    serve(
        &Server::http("127.0.0.1:8000")?,
        &pages.base("/admin/outbox")?,
        &login,
    )
}

/// Serves until the server is unblocked. A real application has several threads.
pub(crate) fn serve(
    server: &Server,
    pages: &Pages,
    login: &str,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    for mut request in server.incoming_requests() {
        let response = answer(&mut request, pages, login)?;
        let (head, body) = response.into_parts();
        let mut response = Response::from_data(body).with_status_code(head.status.as_u16());
        for (name, value) in &head.headers {
            response.add_header(
                Header::from_bytes(name.as_str(), value.as_bytes()).map_err(|()| "a header")?,
            );
        }
        // The client may be gone.
        let _ = request.respond(response);
    }
    Ok(())
}

fn answer(
    request: &mut Request,
    pages: &Pages,
    login: &str,
) -> Result<http::Response<Vec<u8>>, Box<dyn Error + Send + Sync>> {
    let mut asked = http::Request::builder()
        .method(request.method().as_str())
        .uri(request.url());
    let mut is_staff = false;
    for header in request.headers() {
        is_staff |= header.field.equiv("Authorization") && header.value == login;
        asked = asked.header(header.field.as_str().as_str(), header.value.as_str());
    }
    if !is_staff {
        let refused = http::Response::builder().status(401);
        let refused = refused.header("www-authenticate", "Basic realm=\"admin\"");
        return Ok(refused.body(Vec::new())?);
    }
    let mut body = Vec::new();
    let reader = request.as_reader();
    reader.take(MOST_BYTES + 1).read_to_end(&mut body)?;
    if body.len() as u64 > MOST_BYTES {
        return Ok(plain(http::StatusCode::PAYLOAD_TOO_LARGE, "too large\n"));
    }
    let mut visitor = Visitor::known("ann", Rights::all());
    if let Some(peer) = request.remote_addr() {
        visitor = visitor.from_peer(peer.ip());
    }
    Ok(pages.respond(asked.body(body)?, visitor))
}
