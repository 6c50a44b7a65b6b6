//! Pausing and resuming destinations and topics.

use std::time::Duration;

use diesel_outbox::admin::{self, Note, Pausable};
use diesel_outbox::program::{self, Act};

use super::{bad_request, database_away};
use crate::pause::{OPERATOR, check_reason};
use crate::request::Form;
use crate::{AUDIT, Guest, Request, Response, Site};

const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// The destination or topic to pause or resume.
struct Which {
    kind: Pausable,
    name: String,
}

impl Which {
    fn of(form: &Form) -> Result<Self, &'static str> {
        let kind = match form.get("kind") {
            Some("topic") => Pausable::Topic,
            Some("destination") => Pausable::Destination,
            _ => return Err("The kind must be destination or topic."),
        };
        match form.get("name").map(str::trim) {
            Some(name) if !name.is_empty() => Ok(Self {
                kind,
                name: name.to_owned(),
            }),
            _ => Err("The name is missing."),
        }
    }
}

pub(super) fn pause(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let (which, duration) = match (Which::of(&form), duration(&form)) {
        (Ok(which), Ok(duration)) => (which, duration),
        (Err(error), _) => return bad_request(site, guest, request, error),
        (_, Err(error)) => return bad_request(site, guest, request, &error),
    };
    let given = form.get("reason").map_or("", str::trim);
    let reason = if given.is_empty() { OPERATOR } else { given };
    if let Err(why) = check_reason(reason) {
        return bad_request(site, guest, request, &format!("The reason {why}."));
    }
    let (kind, name) = (which.kind, which.name.as_str());
    let note = Note::new(&guest.who, reason);
    let done = site.changes.run(|conn, outbox| {
        program::audited(conn, outbox, &note, Act::Pause, name, |conn| {
            admin::pause(conn, outbox, kind, name, reason, duration).map(|()| true)
        })
    });
    site.forget();
    match done {
        Ok(_) => {
            let kind = which.kind.as_str();
            let time = duration.map_or("until resumed".to_owned(), |time| {
                humantime::format_duration(time).to_string()
            });
            log::info!(target: AUDIT, event = "admin_pause", who = guest.who, peer:% = guest.peer, kind = kind, name = which.name, reason = reason, how_long = time; "{:?} paused the {kind} {:?}", guest.who, which.name);
            Response::see_other("/?done=paused")
        }
        Err(error) => database_away(site, guest, request, &format!("{error:#}")),
    }
}

pub(super) fn resume(site: &Site, guest: &Guest, request: &Request) -> Response {
    let which = match Which::of(&request.form()) {
        Ok(which) => which,
        Err(error) => return bad_request(site, guest, request, error),
    };
    let (kind, name) = (which.kind, which.name.as_str());
    let note = Note::new(&guest.who, "");
    let done = site.changes.run(|conn, outbox| {
        program::audited(conn, outbox, &note, Act::Resume, name, |conn| {
            admin::resume(conn, outbox, kind, name)
        })
    });
    site.forget();
    match done {
        Ok(was_paused) => {
            let kind = which.kind.as_str();
            log::info!(target: AUDIT, event = "admin_resume", who = guest.who, peer:% = guest.peer, kind = kind, name = which.name, was_paused = was_paused; "{:?} resumed the {kind} {:?}", guest.who, which.name);
            Response::see_other(&format!("/?done=resumed&count={}", u8::from(was_paused)))
        }
        Err(error) => database_away(site, guest, request, &format!("{error:#}")),
    }
}

/// `None`: until resumed.
fn duration(form: &Form) -> Result<Option<Duration>, String> {
    let Some(text) = form
        .get("for")
        .map(str::trim)
        .filter(|text| !text.is_empty())
    else {
        return Ok(None);
    };
    match humantime::parse_duration(text) {
        Ok(time) if time > LONGEST => Err(format!(
            "{text:?} is longer than a year: leave the duration empty to pause until resumed"
        )),
        Ok(time) => Ok(Some(time)),
        Err(error) => Err(format!(
            "{text:?} is not a duration such as 10min or 2h: {error}"
        )),
    }
}
