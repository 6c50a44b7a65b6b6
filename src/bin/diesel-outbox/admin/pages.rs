//! The pages: HTML made on the server, which works without script.

use maud::{DOCTYPE, Markup, html};

use super::http::{Request, Response, Status};
use super::{Site, Visitor};

/// A file that pages need.
pub(super) fn asset(path: &str) -> Option<Response> {
    match path {
        "/assets/style.css" => Some(Response::asset(
            "text/css; charset=utf-8",
            include_str!("pages/style.css"),
        )),
        _ => None,
    }
}

/// Asks for the token.
pub(super) fn login(_site: &Site, request: &Request) -> Response {
    let next = request.query.get("next").unwrap_or("/");
    page(
        Status::Ok,
        &html! {
            form method="post" action="/login" {
                input type="hidden" name="next" value=(next);
                label { "Token" input type="password" name="token" autofocus required; }
                label { "Your name, for the audit log" input name="name" maxlength="60"; }
                button { "Log in" }
            }
        },
    )
}

/// A page to look at.
pub(super) fn show(site: &Site, visitor: &Visitor, request: &Request) -> Response {
    match request.path.as_str() {
        "/" => page(
            Status::Ok,
            &html! { h1 { (site.config.table) } p { (visitor.who) } },
        ),
        _ => page(Status::NotFound, &html! { p { "There is no such page." } }),
    }
}

/// A change that was asked for, by a visitor who may.
pub(super) fn change(_site: &Site, _visitor: &Visitor, _request: &Request) -> Response {
    page(
        Status::NotFound,
        &html! { p { "There is no such change." } },
    )
}

fn page(status: Status, content: &Markup) -> Response {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                link rel="stylesheet" href="/assets/style.css";
                title { "outbox" }
            }
            body { (content) }
        }
    };
    Response::html(status, page.into_string())
}
