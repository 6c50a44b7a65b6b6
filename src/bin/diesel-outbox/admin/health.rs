//! `/livez` and `/readyz`: whether the process is to be restarted, and whether it can work.

use diesel_outbox::admin;

use super::Site;
use super::http::{Response, Status};

/// Whether threads are at work.
pub(super) fn alive(site: &Site) -> Response {
    match &site.relay {
        Some(relay) if relay.has_failed() => answer(false, "a thread of the relay has ended"),
        Some(_) => answer(true, "ok"),
        None => answer(true, "ok: no relay runs in this process"),
    }
}

/// Whether database, lease and schema are there.
pub(super) fn ready(site: &Site) -> Response {
    if let Some(relay) = &site.relay {
        return answer(relay.is_healthy(), "database, lease or a thread is missing");
    }
    match site.database.run(admin::check_schema) {
        Ok(()) => answer(true, "ok: no relay runs in this process"),
        Err(error) => answer(false, &format!("{error:#}")),
    }
}

fn answer(is_good: bool, words: &str) -> Response {
    let status = if is_good {
        Status::Ok
    } else {
        Status::Unavailable
    };
    Response::text(status, format!("{words}\n"))
}
