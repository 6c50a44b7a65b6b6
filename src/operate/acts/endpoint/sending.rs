//! Acts that send an endpoint many messages that it did not get.

use std::time::SystemTime;

use diesel::PgConnection;

use super::{counted, of_shell};
use crate::endpoints::sql::missed::Bulked;
use crate::endpoints::{EndpointError, Endpoints};
use crate::operate::bulk::Bulk;
use crate::operate::chosen::{WrongChoice, time};
use crate::operate::endpoints::recover::Recover;
use crate::operate::sql::audit::Act;
use crate::operate::sql::waiting::WaitingChange;

type SendMany = fn(
    Endpoints<'_>,
    &mut PgConnection,
    &str,
    Sending,
    Bulk<'_>,
) -> Result<Option<Bulked>, EndpointError>;

/// An act that sends an endpoint many messages, with its words.
#[derive(Debug)]
pub struct SendingAct {
    /// The act, as an imperative: `recover`.
    pub name: &'static str,
    /// Its path in JSON.
    pub path: &'static str,
    /// What the act does, in a sentence.
    pub about: &'static str,
    /// What its option `missing` adds. `None`: it has no such option.
    pub missing: Option<&'static str>,
    /// How it is recorded.
    pub act: Act,
    /// Sends the messages, or counts them.
    pub send: SendMany,
}

/// What an act sends.
#[derive(Debug, Clone, Copy)]
pub struct Sending {
    pub(super) since: SystemTime,
    pub(super) what: Recover,
}

/// What an act has sent, or would send, and what it leaves.
#[derive(Debug, Clone, Copy)]
pub struct SentMessages {
    /// The messages.
    pub messages: Bulked,
    /// Messages that wait for their next attempt at the endpoint. `None`: so many that counting them takes too long.
    pub retrying: Option<u64>,
    is_enabled: bool,
}

impl SendingAct {
    /// What becomes of the messages.
    pub const BECOMES: &'static str = "Each is enqueued as the same message, with its former place in its ordering key, and its \
        attempts are reset. Each transaction enqueues at most 1,000 messages, oldest first. The same act continues after an \
        interruption, and enqueues no message twice. What the endpoint missed is read from the outbox and the ledger, which keeps \
        payloads if `OUTBOX_LEDGER_PAYLOAD` is set.";
    /// How to undo it.
    pub const UNDO: &'static str = "Until they are sent, `diesel-outbox message cancel --destination NAME` cancels them, with all \
        others that wait for the endpoint.";

    /// What the act sends: messages since this time, and with `missing` also those that the endpoint has missed.
    ///
    /// # Errors
    /// A [`WrongChoice`] of `since` or `missing`.
    pub fn read(&self, since: &str, missing: bool) -> Result<Sending, WrongChoice> {
        if missing && self.missing.is_none() {
            let why = format!("{} sends nothing else than what was missed", self.name);
            return Err(WrongChoice::new("missing", why));
        }
        Ok(Sending {
            since: time(since.trim()).map_err(|why| WrongChoice::new("since", why))?,
            what: match missing {
                true => Recover::AndMissed,
                false => Recover::DeadLetters,
            },
        })
    }

    /// Sends the messages in steps, and records who did and why; or counts them, if `bulk` is a dry run. What is left is counted
    /// first, so an error says nothing about what was sent. `None`: there is no such endpoint.
    ///
    /// # Errors
    /// An [`EndpointError`]. Completed steps stay, and the same call continues.
    pub fn perform(
        &self,
        conn: &mut PgConnection,
        endpoints: Endpoints<'_>,
        name: &str,
        sending: Sending,
        bulk: Bulk<'_>,
    ) -> Result<Option<SentMessages>, EndpointError> {
        let found = bulk.limited(conn, |conn| {
            let found = endpoints.get(conn, name)?;
            let found = found.map(|found| {
                let retrying = counted(conn, endpoints, name, WaitingChange::Retry)?;
                Ok::<_, EndpointError>((found.enabled, retrying))
            });
            found.transpose()
        })?;
        let Some((is_enabled, retrying)) = found else {
            return Ok(None);
        };
        let sent = (self.send)(endpoints, conn, name, sending, bulk)?;
        Ok(sent.map(|messages| SentMessages {
            messages,
            retrying,
            is_enabled,
        }))
    }
}

impl SentMessages {
    /// What is not sent to the endpoint of this name, and why, in sentences.
    pub fn leaves(&self, name: &str) -> Vec<String> {
        let messages = |count| match count {
            1 => "1 message".to_owned(),
            _ => format!("{count} messages"),
        };
        let name = of_shell(name);
        let lost = self.messages.without_payload;
        let lost = (lost > 0).then(|| {
            format!(
                "Not sent: {}, of which the ledger has no payload (`OUTBOX_LEDGER_PAYLOAD`).",
                messages(lost)
            )
        });
        let retrying = self.retrying.map_or("many messages".to_owned(), messages);
        let retrying = (self.retrying != Some(0)).then(|| {
            format!(
                "Also retrying: {retrying}, due now with `diesel-outbox message retry --destination {name}`."
            )
        });
        let disabled = (!self.is_enabled).then(|| {
            format!(
                "The endpoint is disabled: its messages wait until `diesel-outbox endpoint enable {name}`."
            )
        });
        [lost, retrying, disabled].into_iter().flatten().collect()
    }
}
