//! Pausing and resuming destinations and topics.

use diesel_outbox::admin::{Note, Pausable};
use diesel_outbox::program::{self, PauseAnswer, Pausing};

use uuid::Uuid;

use super::acts::unknown_aside;
use super::{Refusal, Visit};
use crate::AUDIT;
use crate::request::Form;
use crate::response::Response;

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
        let kind = kind.parse();
        let kind = kind.map_err(|_| "The kind must be destination, topic or tenant.".to_owned())?;
        match name.trim() {
            "" => Err("The name is missing.".to_owned()),
            name if kind == Pausable::Tenant && name.parse::<Uuid>().is_err() => {
                Err("A tenant is a UUID.".to_owned())
            }
            name => Ok(Self {
                kind,
                name: name.to_owned(),
            }),
        }
    }

    /// Pauses for a time such as `2h`, or until resumed. `is_forced`: also a destination that nobody knows.
    pub(super) fn pause(
        &self,
        visit: &Visit<'_>,
        reason: &str,
        time: Option<&str>,
        is_forced: bool,
    ) -> Result<PauseAnswer, Refusal> {
        let reason = Some(reason.trim()).filter(|reason| !reason.is_empty());
        let pausing = Pausing::new(self.kind, &self.name, reason, time, is_forced);
        let pausing = pausing.map_err(|wrong| Refusal::Wrong(wrong.into()))?;
        let configured = program::all_destinations(&visit.site.config);
        let answer = visit.run(&visit.site.changes, |conn, outbox| {
            let names = configured.into_iter().map(|one| one.name);
            unknown_aside(pausing.perform(conn, outbox, names, &visit.guest.who))
        })?;
        let answer = answer.map_err(Refusal::Invalid)?;
        if answer.has_changed {
            let time = time.unwrap_or("until resumed").to_owned();
            let (kind, name) = (self.kind.as_str(), self.name.clone());
            let reason = answer.pause.reason.clone();
            visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_pause", who = who, peer:% = peer, kind = kind, name = name, reason = reason, how_long = time; "{who:?} paused the {kind} {name:?}"));
        }
        Ok(answer)
    }

    /// `false`: this was not paused.
    pub(super) fn resume(&self, visit: &Visit<'_>, why: &str) -> Result<bool, Refusal> {
        let (kind, name) = (self.kind, self.name.as_str());
        let note = Note::new(&visit.guest.who, why);
        let was_paused = visit.run(&visit.site.changes, |conn, outbox| {
            program::resume(conn, outbox, kind, name, &note)
        })?;
        let (kind, name) = (kind.as_str(), name.to_owned());
        visit.log(move |who, peer| log::info!(target: AUDIT, event = "admin_resume", who = who, peer:% = peer, kind = kind, name = name, was_paused = was_paused; "{who:?} resumed the {kind} {name:?}"));
        Ok(was_paused)
    }
}

pub(super) fn pause(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let which = Which::of(visit.form).map_err(Refusal::Invalid)?;
    // The form stands beside a destination or topic that the page knows.
    let time = Some(visit.get("for")).filter(|time| !time.trim().is_empty());
    let answer = which.pause(visit, visit.get("reason"), time, true)?;
    Ok(Response::see_other(match answer.has_changed {
        true => "/?done=paused",
        false => "/?done=paused_longer",
    }))
}

pub(super) fn resume(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let which = Which::of(visit.form).map_err(Refusal::Invalid)?;
    let count = u8::from(which.resume(visit, visit.get("why"))?);
    Ok(Response::see_other(&format!(
        "/?done=resumed&count={count}"
    )))
}
