//! The pages at `/admin/outbox` of an application on tiny_http, behind the login of the application.
//!
//! ```sh
//! export ADMIN_LOGIN="Basic $(printf 'ann:secret' | base64)"
//! scripts/with-postgres cargo run -p diesel-outbox-pages --example tiny_http
//! open http://ann:secret@127.0.0.1:8000/admin/outbox
//! ```

use std::error::Error;
use std::io::Cursor;

use diesel_outbox_pages::{Pages, Rights, Visitor, plain};
use tiny_http::{Header, Request, Response, Server};

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let login = std::env::var("ADMIN_LOGIN")?;
    let config = diesel_outbox::config::from_env()?;
    let pages = Pages::operators(&config, config.database_url()?, None)?.base("/admin/outbox")?;
    serve(&Server::http("127.0.0.1:8000")?, &pages, &login);
    Ok(())
}

/// Serves until the server is unblocked. A real application has several threads.
pub(crate) fn serve(server: &Server, pages: &Pages, login: &str) {
    for mut request in server.incoming_requests() {
        let response = answer(&mut request, pages, login);
        // The client may be gone.
        let _ = request.respond(response);
    }
}

fn answer(request: &mut Request, pages: &Pages, login: &str) -> Response<Cursor<Vec<u8>>> {
    let headers = request.headers().to_vec();
    let is_login = |one: &Header| one.field.equiv("Authorization") && one.value == login;
    let known = headers.iter().any(is_login);
    let (method, target) = (request.method().to_string(), request.url().to_owned());
    let headers = headers.iter().map(|one| (one.field.as_str(), &one.value));
    let (status, headers, body) =
        diesel_outbox_pages::serve(&method, &target, headers, request.as_reader(), |asked| {
            match known {
                true => pages.respond(asked, Visitor::known("ann", Rights::all())),
                false => refused(),
            }
        });
    let header = |(name, value): (String, String)| Header::from_bytes(name, value).ok();
    let headers = headers.into_iter().filter_map(header).collect();
    Response::new(status.into(), headers, Cursor::new(body), None, None)
}

fn refused() -> http::Response<Vec<u8>> {
    let mut refused = plain(http::StatusCode::UNAUTHORIZED, "log in\n");
    let ask = http::HeaderValue::from_static("Basic realm=\"admin\"");
    refused.headers_mut().insert("www-authenticate", ask);
    refused
}
