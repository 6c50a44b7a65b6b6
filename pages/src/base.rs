//! The path below which the pages are served (`OUTBOX_ADMIN_BASE`).

use http::header::LOCATION;
use http::{HeaderValue, Response};

/// The attributes of our pages that hold addresses. Texts of others cannot look like them: quotation marks are escaped.
const ATTRIBUTES: [&str; 4] = [" href=\"/", " action=\"/", " formaction=\"/", " src=\"/"];

/// The path within the pages: a proxy may keep the base or remove it.
pub(crate) fn within(base: &str, path: &str) -> String {
    match path.strip_prefix(base) {
        Some(rest) if rest.starts_with('/') => rest.to_owned(),
        Some(rest) if rest.is_empty() || rest.starts_with('?') => format!("/{rest}"),
        _ => path.to_owned(),
    }
}

/// Writes the base into the addresses of a response.
pub(crate) fn add(base: &str, response: &mut Response<Vec<u8>>, is_page: bool) {
    if base.is_empty() {
        return;
    }
    if let Some(location) = response.headers_mut().get_mut(LOCATION)
        && let Ok(path) = location.to_str()
        && let Ok(below) = HeaderValue::from_str(&format!("{base}{path}"))
    {
        *location = below;
    }
    if is_page && let Ok(page) = std::str::from_utf8(response.body()) {
        let below = |page: String, attribute: &str| {
            let (name, slash) = attribute.split_at(attribute.len() - 1);
            page.replace(attribute, &format!("{name}{base}{slash}"))
        };
        *response.body_mut() = ATTRIBUTES
            .into_iter()
            .fold(page.to_owned(), below)
            .into_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_is_removed_only_as_a_whole() {
        for (base, path, rest) in [
            ("", "/dead", "/dead"),
            ("/a/b", "/a/b", "/"),
            ("/a/b", "/a/b/", "/"),
            ("/a/b", "/a/b?q=1", "/?q=1"),
            ("/a/b", "/a/b/dead", "/dead"),
            ("/a/b", "/dead", "/dead"),
            ("/a/b", "/a/bc", "/a/bc"),
        ] {
            assert_eq!(within(base, path), rest, "{base} {path}");
        }
    }

    #[test]
    fn addresses_of_a_page_get_the_base() {
        let page = maud::html! {
            a href="/dead" title=" href=\"/" { " href=\"/x" }
            a href="https://example.com/" {}
            form action="/pause" { button formaction="/resume" {} }
        };
        let mut response = Response::new(page.into_string().into_bytes());
        let headers = response.headers_mut();
        headers.insert(LOCATION, HeaderValue::from_static("/login?next=%2F"));
        add("/ops", &mut response, true);
        assert_eq!(response.headers()[LOCATION], "/ops/login?next=%2F");
        let body = String::from_utf8(response.into_body()).expect("UTF-8");
        let expected = maud::html! {
            a href="/ops/dead" title=" href=\"/" { " href=\"/x" }
            a href="https://example.com/" {}
            form action="/ops/pause" { button formaction="/ops/resume" {} }
        };
        assert_eq!(body, expected.into_string());
    }
}
