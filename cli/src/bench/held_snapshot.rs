//! Whether a relay slows down while a transaction keeps vacuum from removing what was settled.

use anyhow::{Context, Result};
use comfy_table::Table;
use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use diesel_outbox::Relay;
use serde_json::{Value, json};

use super::delivery::{Delivery, deliver, deliver_behind, mean_of, rate_of};
use super::ground::{Fill, Ground};
use super::report::{self, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use crate::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Messages settled while the transaction is open
    #[arg(long, default_value_t = 1_000_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    settled: u64,
    /// Messages delivered after them, which are measured: by the same relay, and as many again by one
    /// that has just started
    #[arg(long, default_value_t = 200_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// How often each is measured, in turns
    #[arg(long, default_value_t = 1, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

/// Whose transaction is open.
#[derive(Debug, Clone, Copy)]
enum Holder {
    Nobody,
    /// Has read something long ago, and will read on as of then.
    OldReader,
    /// Has written something and does not commit.
    IdleWriter,
}

const HOLDERS: [Holder; 3] = [Holder::Nobody, Holder::OldReader, Holder::IdleWriter];

impl Holder {
    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "nobody",
            Self::OldReader => "old_reader",
            Self::IdleWriter => "idle_writer",
        }
    }

    /// Opens the transaction.
    fn hold(self, ground: &Ground) -> Result<Option<PgConnection>> {
        let begin = match self {
            Self::Nobody => return Ok(None),
            Self::OldReader => "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1",
            Self::IdleWriter => "BEGIN; SELECT txid_current()",
        };
        let mut conn = ground.connect()?;
        conn.batch_execute("SET idle_in_transaction_session_timeout = 0")?;
        conn.batch_execute(begin)?;
        Ok(Some(conn))
    }
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let mut measured = HOLDERS.map(Measured::new);
    for round in 1..=options.rounds {
        for of_holder in &mut measured {
            ground.say(format_args!("round {round}: {}", of_holder.holder.name()));
            of_holder.once_more(options, ground)?;
        }
    }
    let [nobody, ..] = &measured;
    let (free, free_anew) = (rate_of(&nobody.going_on), rate_of(&nobody.anew));
    let run = |measured: &Measured| {
        let (going_on, anew) = (&measured.going_on, &measured.anew);
        json!({
            "holder": measured.holder.name(),
            "messages_per_second": rate_of(going_on),
            "ratio_to_nobody": rate_of(going_on) / free,
            "claim_ms": mean_of(going_on, Delivery::claim_ms),
            "claim_p99_ms": mean_of(going_on, Delivery::claim_p99_ms),
            "claim_max_ms": mean_of(going_on, Delivery::claim_max_ms),
            "own_cpu_us_per_message": mean_of(going_on, Delivery::cpu_us_per_message),
            "messages_per_second_after_start": rate_of(anew),
            "ratio_to_nobody_after_start": rate_of(anew) / free_anew,
        })
    };
    Ok(json!({
        "settled": options.settled,
        "messages": options.messages,
        "rounds": options.rounds,
        "runs": measured.iter().map(run).collect::<Vec<_>>(),
    }))
}

/// What was measured beside one of them.
struct Measured {
    holder: Holder,
    /// By a relay that has settled everything before, too.
    going_on: Vec<Delivery>,
    /// By one that has just started.
    anew: Vec<Delivery>,
}

impl Measured {
    fn new(holder: Holder) -> Self {
        Self {
            holder,
            going_on: Vec::new(),
            anew: Vec::new(),
        }
    }

    fn once_more(&mut self, options: &Options, ground: &mut Ground) -> Result<()> {
        ground.fresh()?;
        let held = self.holder.hold(ground)?;
        ground.fill(&Fill::plain(options.settled + options.messages))?;
        ground.quiet()?;
        let relay = Relay::from_config(ground.config.clone());
        let going_on = deliver_behind(ground, relay, options.settled, options.messages)?;
        ground.fill(&Fill::plain(options.messages))?;
        ground.quiet()?;
        self.anew.push(deliver(ground, options.messages)?);
        self.going_on.push(going_on);
        if let Some(mut conn) = held {
            conn.batch_execute("COMMIT").with_context(|| {
                format!(
                    "the transaction of {} was not held to the end",
                    self.holder.name()
                )
            })?;
        }
        Ok(())
    }
}

pub(super) fn table(report: &Value) -> Table {
    report::runs(
        report,
        &[
            ("an open transaction of", "holder", Unit::Word),
            ("delivered/s", "messages_per_second", Unit::Count),
            ("of the rate without", "ratio_to_nobody", Unit::Ratio),
            (
                "of it right after a start",
                "ratio_to_nobody_after_start",
                Unit::Ratio,
            ),
            ("a claim", "claim_ms", Unit::Millis),
            ("99 % of claims", "claim_p99_ms", Unit::Millis),
            ("the slowest", "claim_max_ms", Unit::Millis),
            (
                "own CPU per message",
                "own_cpu_us_per_message",
                Unit::Micros,
            ),
        ],
    )
}
