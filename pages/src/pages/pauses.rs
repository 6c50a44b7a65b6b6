//! Pausing and resuming destinations and topics.

use std::time::Duration;

use diesel_outbox::admin::{self, Note, Pausable};
use diesel_outbox::program::{self, Act};

use super::Refusal;
use crate::pause::{OPERATOR, check_reason};
use crate::request::Form;
use crate::{AUDIT, Guest, Request, Response, Site};

const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// The destination or topic to pause or resume.
pub(super) struct Which {
    kind: Pausable,
    name: String,
}

impl Which {
    fn of(form: &Form) -> Result<Self, String> {
        let name = form.get("name").unwrap_or_default();
        Self::named(form.get("kind").unwrap_or_default(), name)
    }

    pub(super) fn named(kind: &str, name: &str) -> Result<Self, String> {
        let kind = match kind {
            "topic" => Pausable::Topic,
            "destination" => Pausable::Destination,
            _ => return Err("The kind must be destination or topic.".to_owned()),
        };
        match name.trim() {
            "" => Err("The name is missing.".to_owned()),
            name => Ok(Self {
                kind,
                name: name.to_owned(),
            }),
        }
    }

    /// Pauses for a time such as `2h`, or until resumed.
    pub(super) fn pause(
        &self,
        site: &Site,
        guest: &Guest,
        reason: &str,
        time: Option<&str>,
    ) -> Result<(), Refusal> {
        let duration = duration(time).map_err(Refusal::Invalid)?;
        let reason = match reason.trim() {
            "" => OPERATOR,
            given => given,
        };
        check_reason(reason).map_err(|why| Refusal::Invalid(format!("The reason {why}.")))?;
        let (kind, name) = (self.kind, self.name.as_str());
        let note = Note::new(&guest.who, reason);
        let done = site.changes.run(|conn, outbox| {
            program::audited(conn, outbox, &note, Act::Pause, name, |conn| {
                admin::pause(conn, outbox, kind, name, reason, duration).map(|()| true)
            })
        });
        site.forget();
        done?;
        let kind = kind.as_str();
        let time = duration.map_or("until resumed".to_owned(), |time| {
            humantime::format_duration(time).to_string()
        });
        log::info!(target: AUDIT, event = "admin_pause", who = guest.who, peer:% = guest.peer, kind = kind, name = name, reason = reason, how_long = time; "{:?} paused the {kind} {name:?}", guest.who);
        Ok(())
    }

    /// `false`: this was not paused.
    pub(super) fn resume(&self, site: &Site, guest: &Guest) -> Result<bool, Refusal> {
        let (kind, name) = (self.kind, self.name.as_str());
        let note = Note::new(&guest.who, "");
        let done = site.changes.run(|conn, outbox| {
            program::audited(conn, outbox, &note, Act::Resume, name, |conn| {
                admin::resume(conn, outbox, kind, name)
            })
        });
        site.forget();
        let was_paused = done?;
        let kind = kind.as_str();
        log::info!(target: AUDIT, event = "admin_resume", who = guest.who, peer:% = guest.peer, kind = kind, name = name, was_paused = was_paused; "{:?} resumed the {kind} {name:?}", guest.who);
        Ok(was_paused)
    }
}

pub(super) fn pause(site: &Site, guest: &Guest, request: &Request) -> Response {
    let form = request.form();
    let reason = form.get("reason").unwrap_or_default();
    let paused = Which::of(&form)
        .map_err(Refusal::Invalid)
        .and_then(|which| which.pause(site, guest, reason, form.get("for")));
    match paused {
        Ok(()) => Response::see_other("/?done=paused"),
        Err(refusal) => refusal.page(site, guest, request),
    }
}

pub(super) fn resume(site: &Site, guest: &Guest, request: &Request) -> Response {
    let resumed = Which::of(&request.form())
        .map_err(Refusal::Invalid)
        .and_then(|which| which.resume(site, guest));
    match resumed {
        Ok(was_paused) => {
            Response::see_other(&format!("/?done=resumed&count={}", u8::from(was_paused)))
        }
        Err(refusal) => refusal.page(site, guest, request),
    }
}

/// `None`: until resumed.
fn duration(text: Option<&str>) -> Result<Option<Duration>, String> {
    let Some(text) = text.map(str::trim).filter(|text| !text.is_empty()) else {
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
