//! `/livez` and `/readyz`: whether the process is to be restarted, and whether it can work.

use diesel_outbox::{Health, admin};

use super::Site;
use super::http::{Response, Status};

/// Whether threads are at work, and where something is due, whether it goes on.
pub(super) fn alive(site: &Site) -> Response {
    match &site.relay {
        Some(relay) => {
            let health = relay.health();
            answer(health.is_live(), &health)
        }
        None => Response::text(Status::Ok, "ok: no relay runs in this process\n"),
    }
}

/// Whether database, lease and schema are there.
pub(super) fn ready(site: &Site) -> Response {
    if let Some(relay) = &site.relay {
        let health = relay.health();
        return answer(health.is_ready(), &health);
    }
    match site.database.run(admin::check_schema) {
        Ok(()) => Response::text(Status::Ok, "ok: no relay runs in this process\n"),
        Err(error) => Response::text(Status::Unavailable, format!("{error:#}\n")),
    }
}

fn answer(is_good: bool, health: &Health) -> Response {
    let status = if is_good {
        Status::Ok
    } else {
        Status::Unavailable
    };
    Response::text(status, format!("{health}\n"))
}
