//! Acts on one endpoint. Each is one file below, listed once in [`ENDPOINT_ACTS`] or [`SENDING_ACTS`]: commands, pages, JSON and
//! the documents of OpenAPI present what is listed.
//!
//! To add one: its file, and its line in the list.

mod backfill;
mod disable;
mod enable;
#[cfg(feature = "http")]
mod put;
mod recover;
mod remove;
#[cfg(feature = "http")]
mod request;
mod rotate;
mod send_again;
mod sending;

use std::borrow::Cow;
use std::time::Duration;

use diesel::PgConnection;

use crate::config::{Config, LedgerPayload};
use crate::endpoints::{EndpointError, Endpoints};
use crate::operate::sql::audit::Act;
use crate::operate::sql::selection::Selection;
use crate::operate::sql::waiting::{WaitingChange, count};
use crate::operate::waiting::{Note, audited};
use crate::sql::pinned::pinned;

use self::backfill::BACKFILL;
pub use self::disable::{DISABLE, while_disabled};
pub use self::enable::ENABLE;
#[cfg(feature = "http")]
pub use self::put::refusal;
pub use self::recover::RECOVER;
pub use self::remove::REMOVE;
#[cfg(feature = "http")]
pub use self::request::{begin_test, begin_verification};
pub use self::rotate::rotate;
pub use self::send_again::send_again;
pub use self::sending::{Sending, SendingAct, SentMessages};

/// No index has the messages of one destination together, so counting them reads the outbox.
const LONGEST_COUNT: Duration = Duration::from_secs(2);

/// All acts on one endpoint.
pub static ENDPOINT_ACTS: &[&EndpointAct] = &[&ENABLE, &DISABLE, &REMOVE];

/// All acts that send an endpoint many messages.
pub static SENDING_ACTS: &[&SendingAct] = &[&RECOVER, &BACKFILL];

type ChangeEndpoint =
    fn(Endpoints<'_>, &mut PgConnection, &str, &str) -> Result<bool, EndpointError>;

/// An act on an endpoint, with its words.
#[derive(Debug)]
pub struct EndpointAct {
    /// The act, as an imperative: `disable`.
    pub name: &'static str,
    /// What was done: `disabled`.
    pub done: &'static str,
    /// Its method and path in JSON.
    pub route: (&'static str, &'static str),
    /// What the act does, in a sentence.
    pub about: &'static str,
    /// What becomes of the messages of the endpoint of this name, with these settings.
    pub becomes: fn(&Config, &str) -> String,
    /// How to undo it.
    pub undo: &'static str,
    /// Whether its waiting messages end unsent: it wants to be confirmed.
    pub ends: bool,
    /// How it is recorded.
    pub act: Act,
    change: ChangeEndpoint,
}

/// What an act would do.
#[derive(Debug, Clone)]
pub struct EndpointPreview {
    /// How many messages wait for the endpoint. `None`: so many that counting them takes too long.
    pub waiting: Option<u64>,
    /// What becomes of its messages.
    pub becomes: String,
}

impl EndpointPreview {
    /// How many messages wait, as a sentence.
    pub fn waiting_in_words(&self) -> String {
        match self.waiting {
            None => "Many messages wait for it: they were not counted within 2 s.".to_owned(),
            Some(0) => "No message waits for it.".to_owned(),
            Some(1) => "1 message waits for it.".to_owned(),
            Some(count) => format!("{count} messages wait for it."),
        }
    }
}

impl EndpointAct {
    /// What the act would do. `None`: there is no such endpoint.
    ///
    /// # Errors
    /// If the database fails.
    pub fn preview(
        &self,
        conn: &mut PgConnection,
        endpoints: Endpoints<'_>,
        name: &str,
        config: &Config,
    ) -> Result<Option<EndpointPreview>, EndpointError> {
        if endpoints.get(conn, name)?.is_none() {
            return Ok(None);
        }
        let waiting = counted(conn, endpoints, name, WaitingChange::Cancel)?;
        Ok(Some(EndpointPreview {
            waiting,
            becomes: (self.becomes)(config, name),
        }))
    }

    /// Changes the endpoint, and records who did and why. `false`: there is no such endpoint.
    ///
    /// # Errors
    /// An [`EndpointError`].
    pub fn perform(
        &self,
        conn: &mut PgConnection,
        endpoints: Endpoints<'_>,
        name: &str,
        note: &Note,
    ) -> Result<bool, EndpointError> {
        audited(conn, endpoints.name, note, self.act, name, |conn| {
            (self.change)(endpoints, conn, name, note.why())
        })
    }
}

/// How many messages that name the endpoint the change is about: those that a route sends there are for others, too. `None`: so
/// many that counting them takes too long.
fn counted(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    name: &str,
    change: WaitingChange,
) -> Result<Option<u64>, EndpointError> {
    let its = Selection::default()
        .destination(name.to_owned())
        .tenant_id(endpoints.tenant);
    let count = pinned(conn, endpoints.name, |conn, outbox| {
        count(conn, outbox, &its, change, Some(LONGEST_COUNT))
    })?;
    Ok(count.map(|count| u64::try_from(count).unwrap_or(0)))
}

/// A name as an argument of a command that a person may copy.
fn of_shell(name: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,".contains(c);
    match !name.is_empty() && name.chars().all(is_plain) {
        true => Cow::Borrowed(name),
        false => Cow::Owned(format!("'{}'", name.replace('\'', r"'\''"))),
    }
}

/// How long the ledger keeps what a disabled endpoint misses. `None`: it keeps no content.
pub fn kept_for(config: &Config) -> Option<String> {
    let time = match config.ledger_payload {
        LedgerPayload::WithEntry => config.retention,
        LedgerPayload::For(age) => age,
        _ => return None,
    };
    let text = humantime::format_duration(time).to_string();
    let hours = time.as_secs() / 3600;
    let is_whole = time.subsec_nanos() == 0 && time.as_secs() == hours * 3600;
    Some(if is_whole { format!("{hours} h") } else { text })
}
