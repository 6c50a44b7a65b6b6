//! `diesel-outbox resume`

use std::time::Duration;

use anyhow::{Result, bail};
use diesel_outbox::Outbox;
use diesel_outbox::admin::{self, Pausable};
use diesel_outbox::endpoints::EndpointState;
use diesel_outbox::program;
use diesel_outbox_pages::pause::{find, state_in_words};
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
    /// Resume all endpoints of a tenant; pauses of one of them stay
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
    program::resume(&mut conn, table, kind, name, &note)?;
    let after = admin::pauses(&mut conn, &config.table)?;
    let row = match kind {
        Pausable::Destination => {
            let outbox = Outbox::from(config.table.clone());
            program::or_none(outbox.endpoints().get(&mut conn, name))?
        }
        _ => None,
    };
    let tenant = row.as_ref().and_then(|row| row.tenant_id);
    let of_tenant = tenant.and_then(|tenant| pauses::of_tenant(&after, tenant));
    let Some(pause) = pause else {
        let held = of_tenant.map(|held| format!(", but {}", pauses::sentence(held)));
        bail!(
            "{} {name:?} is not paused{}: `diesel-outbox pause list` shows all pauses",
            kind.as_str(),
            held.unwrap_or_default()
        );
    };
    let own = find(&after, kind, name);
    if json {
        return output::json(&json!({
            "resumed": pauses::as_json(pause),
            "still_paused": own.or(of_tenant).map(pauses::as_json),
            "state": row.map(|row| row.state.as_str()),
        }));
    }
    let (kind, name) = (kind.as_str(), output::shown(name));
    output::line(match (own, of_tenant, row) {
        (Some(own), ..) => format!(
            "resumed, but {}. Repeat the command to end this pause, too",
            pauses::sentence(own)
        ),
        (None, Some(held), _) => format!(
            "resumed, but {}. `diesel-outbox resume tenant {}` ends this pause, too",
            pauses::sentence(held),
            output::shown(&held.name)
        ),
        (None, None, Some(row))
            if matches!(
                row.state,
                EndpointState::Disabled | EndpointState::Unverified
            ) =>
        {
            format!(
                "resumed, but {kind} {name} is {}",
                output::shown(&state_in_words(&row))
            )
        }
        (None, None, _) => format!("{kind} {name} is resumed"),
    })
}
