//! The ground of a scenario: a temporary schema with outboxes, which the scenario fills.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use diesel::connection::SimpleConnection;
use diesel::sql_types::{BigInt, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::admin;
use diesel_outbox::config::Config;
use diesel_outbox::program::{self, SETTINGS};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::Common;
use diesel_outbox_cli::output;
use diesel_outbox_cli::settings::SettingFlags;

/// The topic of messages for the default destination.
pub(super) const TOPIC: &str = "bench.message";
/// The time limit of a statement. The longest is a VACUUM of many million rows.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3600);
/// Messages per INSERT. Signals are checked between two INSERTs.
pub(super) const CHUNK: u64 = 20_000;

/// From this number of messages on, `fill` reports the disk space.
const MANY: u64 = 1_000_000;
/// Bytes of a row without its payload.
const ROW_BYTES: f64 = 210.0;
/// Bytes of a row in the indexes.
const INDEX_BYTES: f64 = 130.0;
/// The share of a page that rows fill.
const FILLFACTOR: f64 = 0.45;

/// The schema of the bench, and the settings of relays that use it.
pub(super) struct Ground {
    pub(super) config: Config,
    pub(super) conn: PgConnection,
    pub(super) schema: String,
    pub(super) payload_bytes: u32,
    is_quiet: bool,
    /// The settings given as flags.
    flags: SettingFlags,
    signals: Receiver<i32>,
    /// Messages enqueued by `fill` so far. The next message ids continue from here.
    filled: u64,
}

#[derive(diesel::QueryableByName)]
struct NameRow {
    #[diesel(sql_type = Text)]
    name: String,
}

/// Messages to enqueue. Topic and key are SQL expressions, in which `n` is the number of the message, from 0.
pub(super) struct Fill {
    pub(super) messages: u64,
    pub(super) topic: String,
    pub(super) ordering_key: String,
}

impl Fill {
    /// Messages for the default destination, without ordering keys.
    pub(super) fn plain(messages: u64) -> Self {
        Self::keyed(messages, "NULL")
    }

    /// Messages for the default destination, with this SQL expression as their ordering keys.
    pub(super) fn keyed(messages: u64, ordering_key: impl Into<String>) -> Self {
        Self {
            messages,
            topic: format!("'{TOPIC}'"),
            ordering_key: ordering_key.into(),
        }
    }
}

impl Ground {
    /// Creates the schema. `remove` drops it.
    pub(super) fn new(
        mut config: Config,
        options: &Common,
        flags: &SettingFlags,
        signals: Receiver<i32>,
    ) -> Result<Self> {
        let schema = format!("diesel_outbox_bench_{}", std::process::id());
        config.table = format!("{schema}.outbox").parse()?;
        let mut conn = connect(&config)?;
        conn.batch_execute(&format!("CREATE SCHEMA {schema}"))
            .context("cannot create the schema of the benchmark")?;
        Ok(Self {
            config,
            conn,
            schema,
            flags: flags.clone(),
            payload_bytes: options.payload_bytes,
            is_quiet: options.json,
            signals,
            filled: 0,
        })
    }

    pub(super) fn remove(mut self) -> Result<()> {
        self.conn
            .batch_execute(&format!("DROP SCHEMA {} CASCADE", self.schema))
            .with_context(|| format!("cannot drop the schema {} of the benchmark", self.schema))
    }

    /// Selects the outbox of this name in the schema. `fresh` creates it.
    pub(super) fn enter(&mut self, name: &str) -> Result<()> {
        self.config.table = format!("{}.{name}", self.schema).parse()?;
        Ok(())
    }

    /// Replaces the selected outbox with an empty outbox.
    pub(super) fn fresh(&mut self) -> Result<()> {
        // A signal may have arrived since the last wait.
        self.wait(Duration::ZERO)?;
        let table = &self.config.table;
        let exists = admin::check_schema(&mut self.conn, table).is_ok();
        if exists {
            sql_query("SELECT outbox_drop($1)")
                .bind::<Text, _>(table.to_string())
                .execute(&mut self.conn)?;
        }
        diesel_outbox::migrate(&mut self.conn, table)?;
        Ok(())
    }

    /// Enqueues many messages quickly. Message ids increase, as the library's ids do.
    pub(super) fn fill(&mut self, fill: &Fill) -> Result<()> {
        let insert = format!(
            "INSERT INTO {} (message_id, topic, payload, ordering_key)
             SELECT id, topic, $1::json, key
               FROM (SELECT lpad(to_hex($2 + n), 32, '0')::uuid AS id,
                            {} AS topic, {} AS key
                       FROM generate_series($3, $4) AS n) AS messages",
            self.config.table, fill.topic, fill.ordering_key
        );
        let payload = payload(self.payload_bytes).to_string();
        if fill.messages >= MANY {
            self.say(format_args!(
                "{} messages take about {:.0} GB on the server's disk",
                output::grouped(fill.messages as f64),
                self.bytes_of(fill.messages) / 1e9
            ));
        }
        let progress = self.progress("enqueueing", fill.messages);
        for first in (0..fill.messages).step_by(CHUNK as usize) {
            self.wait(Duration::ZERO)?;
            let last = fill.messages.min(first + CHUNK) - 1;
            sql_query(&insert)
                .bind::<Text, _>(&payload)
                .bind::<BigInt, _>(i64::try_from(self.filled)?)
                .bind::<BigInt, _>(i64::try_from(first)?)
                .bind::<BigInt, _>(i64::try_from(last)?)
                .execute(&mut self.conn)
                .context("cannot enqueue")?;
            progress.set_position(last + 1);
        }
        progress.finish_and_clear();
        self.filled += fill.messages;
        Ok(())
    }

    /// The approximate size of messages in the table and its indexes.
    fn bytes_of(&self, messages: u64) -> f64 {
        let row = (ROW_BYTES + f64::from(self.payload_bytes)) / FILLFACTOR + INDEX_BYTES;
        messages as f64 * row
    }

    /// Runs VACUUM, ANALYZE and CHECKPOINT now: the enqueued messages would soon cause all three.
    pub(super) fn quiet(&mut self) -> Result<()> {
        self.conn
            .batch_execute(&format!("VACUUM ANALYZE {}", self.config.table))?;
        if let Err(error) = self.conn.batch_execute("CHECKPOINT") {
            eprintln!(
                "outbox-lab: cannot run CHECKPOINT, so a checkpoint may disturb the measurement: {error}"
            );
        }
        Ok(())
    }

    /// Vacuums every table of the schema.
    pub(super) fn vacuum_all(&mut self) -> Result<()> {
        let tables: Vec<NameRow> = sql_query(
            "SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables WHERE schemaname = $1",
        )
        .bind::<Text, _>(&self.schema)
        .load(&mut self.conn)?;
        for NameRow { name } in tables {
            self.wait(Duration::ZERO)?;
            self.conn.batch_execute(&format!("VACUUM ANALYZE {name}"))?;
        }
        Ok(())
    }

    /// Opens one more connection.
    pub(super) fn connect(&self) -> Result<PgConnection> {
        connect(&self.config)
    }

    /// Waits for this time. A signal ends the wait with an error.
    pub(super) fn wait(&self, time: Duration) -> Result<()> {
        match self.signals.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            _ => bail!("interrupted by a signal"),
        }
    }

    /// A progress bar on standard error, if that is a terminal.
    pub(super) fn progress(&self, doing: &'static str, messages: u64) -> ProgressBar {
        if self.is_quiet {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(messages)
            .with_style(style)
            .with_message(doing)
    }

    /// Prints progress to standard error, if that is a terminal.
    pub(super) fn say(&self, what: impl std::fmt::Display) {
        if !self.is_quiet && std::io::stderr().is_terminal() {
            eprintln!("{what}");
        }
    }

    /// Settings for a child process, as environment variables: settings given as flags, and settings that the bench has
    /// set. The child inherits all others.
    pub(super) fn variables(&self) -> Vec<(&'static str, String)> {
        let given = SETTINGS.iter().filter_map(|setting| {
            let value = self.flags.get(setting.variable)?;
            Some((setting.variable, value.to_owned()))
        });
        let url = self.config.url.as_ref().map(ToString::to_string);
        let own = [
            Some(("OUTBOX_TABLE", self.config.table.to_string())),
            Some(("OUTBOX_CONCURRENCY", self.config.concurrency.to_string())),
            url.map(|url| ("OUTBOX_URL", url)),
        ];
        given.chain(own.into_iter().flatten()).collect()
    }

    /// Adds the settings that all numbers depend on.
    pub(super) fn describe(&self, report: &mut Value) {
        report["payload_bytes"] = json!(self.payload_bytes);
        report["senders"] = json!(self.config.concurrency);
        report["batch"] = json!(self.config.batch);
        report["mode"] = json!(self.config.mode.to_string());
    }
}

fn connect(config: &Config) -> Result<PgConnection> {
    Ok(program::connect(
        config.database_url()?,
        "bench",
        STATEMENT_TIMEOUT,
    )?)
}

/// A JSON document of `bytes` bytes.
pub(super) fn payload(bytes: u32) -> Value {
    json!({ "fill": "x".repeat(bytes as usize - r#"{"fill":""}"#.len()) })
}
