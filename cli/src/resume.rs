//! `diesel-outbox resume`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::program::{self, Act};
use diesel_outbox_pages::pause::find;
use serde_json::json;
use uuid::Uuid;

use crate::connection::connect;
use crate::settings::SettingFlags;
use crate::signed::Signed;
use crate::{output, pauses};

/// The actions of `resume`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Resume a destination that an operator, its circuit breaker or its receiver has paused. The pause of its owner ends only if
    /// there is no other
    Destination {
        /// Name of the destination, as in `pause list`
        name: String,
        #[command(flatten)]
        signed: Signed,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Resume all registered destinations of a tenant; pauses of one of them stay
    Tenant {
        /// UUID of the tenant
        tenant: Uuid,
        #[command(flatten)]
        signed: Signed,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Resume a topic
    Topic {
        /// Topic, as in `pause list`
        topic: String,
        #[command(flatten)]
        signed: Signed,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let of_tenant;
    let (kind, name, signed, json) = match action {
        Action::Tenant {
            tenant,
            signed,
            json,
        } => {
            of_tenant = tenant.to_string();
            (Pausable::Tenant, &of_tenant, signed, *json)
        }
        Action::Destination { name, signed, json } => (Pausable::Destination, name, signed, *json),
        Action::Topic {
            topic,
            signed,
            json,
        } => (Pausable::Topic, topic, signed, *json),
    };
    let mut conn = connect(&config, "resume", Duration::from_secs(30))?;
    let before = admin::pauses(&mut conn, &config.table)?;
    let pause = find(&before, kind, name);
    // Also deletes an expired pause, which would have to be deleted later anyway.
    let (table, note) = (&config.table, signed.note());
    program::audited(&mut conn, table, &note, Act::Resume, name, |conn| {
        admin::resume(conn, table, kind, name)
    })?;
    let Some(pause) = pause else {
        bail!(
            "{} {name:?} is not paused: `diesel-outbox pause list` shows all pauses",
            kind.as_str()
        );
    };
    let after = admin::pauses(&mut conn, &config.table)?;
    let left = find(&after, kind, name);
    if json {
        return output::json(&json!({
            "resumed": pauses::as_json(pause),
            "still_paused": left.map(pauses::as_json),
        }));
    }
    let kind = kind.as_str();
    let name = output::shown(name);
    match left {
        None => output::line(format!("{kind} {name} is resumed")),
        Some(left) => output::line(format!(
            "resumed, but {}. Repeat the command to end this pause, too",
            pauses::sentence(left)
        )),
    }
}
