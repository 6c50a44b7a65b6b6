//! Between any server and the pages: requests and responses as servers have them.

use std::io::Read;

use http::{Request, Response, StatusCode};

use crate::api;
use crate::response::Response as Answer;

/// The largest body of a request, in bytes.
const MOST: usize = 256 * 1024;

/// Makes a request from what a server has read, lets `respond` answer, and returns status, headers and body. A malformed
/// request, and one with a body of more than 256 KiB, is refused.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use diesel_outbox_pages::{Pages, Rights, Visitor, serve};
///
/// let config = diesel_outbox::config::from_env()?;
/// let pages = Pages::operators(&config, config.database_url()?, None)?;
/// let headers = [("host", "localhost")];
/// let ann = Visitor::known("ann", Rights::all());
/// let answer = serve("GET", "/", headers, std::io::empty(), |request| {
///     pages.respond(request, ann)
/// });
/// let (status, headers, body) = answer;
/// # Ok(())
/// # }
/// ```
pub fn serve<N: AsRef<str>, V: AsRef<str>>(
    method: &str,
    target: &str,
    headers: impl IntoIterator<Item = (N, V)>,
    body: impl Read,
    respond: impl FnOnce(Request<Vec<u8>>) -> Response<Vec<u8>>,
) -> (u16, Vec<(String, String)>, Vec<u8>) {
    let request = read(method, target, headers, body);
    let refused = |(status, why)| api::refused(target, Answer::text(status, why)).into();
    let response = request.map_or_else(refused, respond);
    let (head, body) = response.into_parts();
    let headers = head.headers.iter().map(|(name, value)| {
        let value = String::from_utf8_lossy(value.as_bytes());
        (name.to_string(), value.into_owned())
    });
    (head.status.as_u16(), headers.collect(), body)
}

/// The error is a refusal.
fn read<N: AsRef<str>, V: AsRef<str>>(
    method: &str,
    target: &str,
    headers: impl IntoIterator<Item = (N, V)>,
    body: impl Read,
) -> Result<Request<Vec<u8>>, (StatusCode, String)> {
    let mut bytes = Vec::new();
    let read = body.take(MOST as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))?;
    if bytes.len() > MOST {
        return Err((StatusCode::PAYLOAD_TOO_LARGE, "too large\n".to_owned()));
    }
    let request = Request::builder().method(method).uri(target);
    let headers = headers.into_iter();
    let request = headers.fold(request, |request, (name, value)| {
        request.header(name.as_ref(), value.as_ref())
    });
    let request = request.body(bytes);
    request.map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))
}

#[cfg(test)]
mod tests {
    use crate::plain;

    use super::*;

    #[test]
    fn a_request_is_passed_on_whole_or_refused() {
        let sent = |target: &str, body: &[u8]| {
            let headers = [("x-a", "b")];
            serve("POST", target, headers, body, |asked| {
                assert_eq!(
                    (asked.method().as_str(), asked.uri().path()),
                    ("POST", target)
                );
                assert_eq!(asked.headers()["x-a"], "b");
                plain(StatusCode::OK, asked.into_body())
            })
        };
        let (status, headers, body) = sent("/a", &[7; MOST]);
        assert_eq!((status, body), (200, vec![7; MOST]));
        assert!(headers.contains(&("cache-control".to_owned(), "no-store".to_owned())));
        for (target, kind) in [
            ("/a", "text/plain; charset=utf-8"),
            ("/a/api/v1/endpoints", "application/problem+json"),
        ] {
            let (status, headers, _) = sent(target, &[7; MOST + 1]);
            assert_eq!(status, 413);
            assert!(
                headers.contains(&("content-type".to_owned(), kind.to_owned())),
                "{headers:?}"
            );
        }
        assert_eq!(sent("no path", b"").0, 400);
    }
}
