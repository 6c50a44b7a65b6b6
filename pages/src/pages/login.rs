//! The login page, and refusals.

use http::StatusCode;
use maud::{Markup, html};

use super::layout::bare;
use crate::Site;
use crate::{Request, Response};

/// The login page.
pub(crate) fn login(site: &Site, request: &Request) -> Response {
    let next = request.query.get("next").unwrap_or("/");
    bare(StatusCode::OK, "Log in", &form(site, next, None))
}

/// Turns a plain-text refusal into a page if the client is a browser.
pub(crate) fn refused(site: &Site, request: &Request, refused: Response) -> Response {
    let accepts = request.header("accept").unwrap_or_default();
    let Some(reason) = refused.words().filter(|_| accepts.contains("text/html")) else {
        return refused;
    };
    let content = if request.path == "/login" {
        let posted = request.form();
        form(site, posted.get("next").unwrap_or("/"), Some(reason))
    } else {
        html! {
            h1 { "Request refused" }
            p.refused role="alert" { (reason) }
            p { a href="/" { "Back to the overview" } }
        }
    };
    let page = bare(refused.status, "Refused", &content);
    refused.with_page(page)
}

fn form(site: &Site, next: &str, error: Option<&str>) -> Markup {
    html! {
        section.panel {
            div.head { h1 { "Log in" } }
            div.body {
                p.quiet { "Outbox: " strong { (site.config.table) } }
                @if let Some(error) = error { p.refused role="alert" id="error" { (error) } }
                form.stack method="post" action="/login" {
                    input type="hidden" name="next" value=(next);
                    label.field { "Token"
                        input type="password" name="token" autocomplete="current-password" required autofocus
                            aria-describedby=[error.map(|_| "error")];
                    }
                    label.field { "Your name, for the audit log"
                        input name="name" maxlength="60" autocomplete="username";
                    }
                    button { "Log in" }
                }
            }
        }
    }
}
