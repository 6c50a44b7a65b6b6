//! `/livez` and `/readyz`: whether the process needs a restart, and whether it can work.

use diesel_outbox::{Health, admin};
use http::StatusCode;

use crate::access::Access;
use crate::request::Request;
use crate::response::Response;
use crate::{Readiness, Site};

/// How much the response says: probes have no token, and database errors name the host and user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Words {
    /// The problems, and what to do about them.
    All,
    /// Only the names of the problems.
    Names,
}

/// How much this request may know.
pub(super) fn words(access: &Access, request: &Request) -> Words {
    let is_known = access.check_host(request).is_ok() && access.script(request).is_ok();
    if is_known { Words::All } else { Words::Names }
}

/// Whether the threads of the relay are running and due messages make progress.
pub(super) fn alive(site: &Site, words: Words) -> Response {
    match &site.relay {
        Some(relay) => {
            let health = relay.health();
            answer(health.is_live(), &said(&health, words))
        }
        None => answer(true, "ok: no relay runs in this process"),
    }
}

/// Whether the database, the lease and the schema are available.
pub(super) fn ready(site: &Site, words: Words) -> Response {
    if let Some(relay) = &site.relay {
        let health = relay.health();
        return answer(health.is_ready(), &said(&health, words));
    }
    match site.database.run(admin::check_schema) {
        Ok(()) => answer(true, "ok: no relay runs in this process"),
        Err(_) if words == Words::Names => answer(false, "no_database, or no outbox in it"),
        Err(error) => answer(false, &format!("{error:#}")),
    }
}

/// Whether a process can work that serves many databases. Their names may be those of tenants.
pub(super) fn of_many(ready: &Readiness, words: Words) -> Response {
    let Readiness {
        is_ready,
        summary,
        details,
    } = ready;
    let said = match words {
        _ if details.is_empty() => summary.clone(),
        Words::All => format!("{summary}; {details}"),
        Words::Names => format!("{summary} (details need the token)"),
    };
    answer(*is_ready, &said)
}

fn said(health: &Health, words: Words) -> String {
    if words == Words::All || health.problems().is_empty() {
        return health.to_string();
    }
    let names: Vec<&str> = health
        .problems()
        .iter()
        .map(|problem| problem.kind.as_str())
        .collect();
    format!("{} (details need the token)", names.join(", "))
}

fn answer(is_good: bool, words: &str) -> Response {
    let status = if is_good {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    Response::text(status, format!("{words}\n"))
}
