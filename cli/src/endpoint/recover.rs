//! `diesel-outbox endpoint recover` and `backfill`

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::admin::{Bulk, Bulked};
use diesel_outbox::endpoints::{EndpointError, Endpoints, Recover};
use diesel_outbox::program;

use crate::{bulk, output, values};

/// Options of `endpoint recover`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Messages have the places in their ordering keys that they had before. Each transaction enqueues 1,000 \
    messages. After Ctrl-C or an outage, the same command continues, and enqueues no message twice. --missing reads the \
    outbox and the ledger, which keeps payloads if OUTBOX_LEDGER_PAYLOAD is set."
)]
pub(crate) struct Recovery {
    #[command(flatten)]
    to: Backfill,
    /// Also the messages that the endpoint wants, and missed while it was disabled or not there
    #[arg(long)]
    missing: bool,
}

/// Options of `endpoint backfill`.
#[derive(Debug, clap::Args)]
pub(crate) struct Backfill {
    /// Name of the endpoint
    name: String,
    /// Messages since this time: 2026-11-21T10:00:00Z, or 2h for two hours ago
    #[arg(long, value_name = "TIME")]
    since: String,
    #[command(flatten)]
    how: bulk::How,
}

pub(super) fn recover(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    what: &Recovery,
) -> Result<()> {
    let Backfill { name, since, .. } = &what.to;
    let since = values::time("--since", since)?;
    let which = match what.missing {
        true => Recover::AndMissed,
        false => Recover::DeadLetters,
    };
    carry_out(
        conn,
        endpoints,
        &what.to,
        ("recover", "recovered"),
        |conn, bulk| endpoints.recover(conn, name, since, which, bulk),
    )?;
    if what.to.how.json {
        return Ok(());
    }
    // Often most of what an endpoint did not get: each waits for its next attempt, up to a day.
    match program::retrying(conn, endpoints, name)? {
        None | Some(0) => Ok(()),
        Some(retrying) => output::line(format!(
            "also retrying: {}, due now with `diesel-outbox message retry --destination {}`",
            output::messages(retrying),
            output::shown(name)
        )),
    }
}

pub(super) fn backfill(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    to: &Backfill,
) -> Result<()> {
    let since = values::time("--since", &to.since)?;
    carry_out(
        conn,
        endpoints,
        to,
        ("backfill", "enqueued"),
        |conn, bulk| endpoints.backfill(conn, &to.name, since, bulk),
    )
}

fn carry_out(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    to: &Backfill,
    (verb, done): (&str, &str),
    mut act: impl FnMut(&mut PgConnection, Bulk<'_>) -> Result<Option<Bulked>, EndpointError>,
) -> Result<()> {
    let Some(found) = endpoints.get(conn, &to.name)? else {
        return super::missing(&to.name);
    };
    let name = output::shown(&to.name);
    let which = format!("for {name}");
    let words = bulk::Words {
        verb,
        done,
        which: &which,
    };
    bulk::carry_out(&to.how, &words, |bulk| match act(conn, bulk)? {
        Some(changed) => Ok(changed),
        None => bail!("the endpoint {name} was removed meanwhile"),
    })?;
    if !found.enabled && !to.how.json {
        output::line(format!(
            "{name} is disabled: its messages wait until `diesel-outbox endpoint enable {name}`"
        ))?;
    }
    Ok(())
}
