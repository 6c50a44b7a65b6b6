//! Many databases, few of them busy: one process serves all, and another program serves one.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use diesel::connection::SimpleConnection;
use diesel::sql_types::{BigInt, Text};
use diesel::{PgConnection, RunQueryDsl, sql_query};
use diesel_outbox::{Outbox, program};
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use url::Url;

use super::ground::{Ground, TOPIC, payload};
use super::measures::{cpu_seconds_of, memory_mib_of, threads_of};
use super::report::{Column, OWN_CPU, Unit};
use super::{MOST_MESSAGES, MOST_ROUNDS};
use diesel_outbox_cli::number::whole;

#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Databases, each with an outbox; the role needs CREATEDB, and the server max_connections above their number
    #[arg(long, default_value_t = 200, value_name = "NUMBER", value_parser = whole(1..=10_000_u64))]
    databases: u64,
    /// Databases that get messages
    #[arg(long, default_value_t = 3, value_name = "NUMBER", value_parser = whole(1..=100_u64))]
    busy: u64,
    /// Messages for each busy database, and for the single one together
    #[arg(long, default_value_t = 60_000, value_name = "NUMBER", value_parser = whole(1..=MOST_MESSAGES))]
    messages: u64,
    /// Number of rounds; each round measures both
    #[arg(long, default_value_t = 2, value_name = "NUMBER", value_parser = whole(1..=MOST_ROUNDS))]
    rounds: u32,
}

const TICK: Duration = Duration::from_millis(20);
/// How long an idle process is watched.
const IDLE: Duration = Duration::from_secs(10);
/// A process that serves nothing for this time has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// Databases that are dropped at the end, and the file that names them.
struct Databases {
    server: PgConnection,
    urls: Vec<(String, Url)>,
    file: PathBuf,
}

impl Databases {
    fn create(ground: &Ground, count: u64) -> Result<Self> {
        let url = Url::parse(ground.config.database_url()?.expose_secret())
            .context("DATABASE_URL must be a URL")?;
        let file = std::env::temp_dir().join(format!("{}.toml", ground.schema));
        let mut all = Self {
            server: ground.connect()?,
            urls: Vec::new(),
            file,
        };
        let progress = ground.progress("creating databases", count);
        for number in 0..count {
            ground.wait(Duration::ZERO)?;
            let name = format!("{}_{number}", ground.schema);
            let template = all.urls.first().map_or("template1", |(first, _)| first);
            let create = format!("CREATE DATABASE {name} TEMPLATE {template}");
            all.server.batch_execute(&create)?;
            let mut url = url.clone();
            url.set_path(&name);
            all.urls.push((name, url));
            if number == 0 {
                diesel_outbox::migrate(&mut all.connect(0)?, Outbox::default().name())?;
            }
            progress.inc(1);
        }
        progress.finish_and_clear();
        let mut file = std::fs::File::create(&all.file)?;
        for (name, url) in &all.urls {
            writeln!(file, "{name} = \"{url}\"")?;
        }
        Ok(all)
    }

    fn connect(&self, number: usize) -> Result<PgConnection> {
        let url = self.urls[number].1.as_str().to_owned().into();
        Ok(program::connect(&url, "bench", PATIENCE)?)
    }

    /// Connections of the process: in all, and the most of one database.
    fn connections(&mut self) -> Result<(i64, i64)> {
        #[derive(diesel::QueryableByName)]
        struct Counts {
            #[diesel(sql_type = BigInt)]
            all: i64,
            #[diesel(sql_type = BigInt)]
            most: i64,
        }
        let counts: Counts = sql_query(
            "SELECT coalesce(sum(count), 0)::bigint AS all, coalesce(max(count), 0) AS most
               FROM (SELECT count(*) FROM pg_stat_activity
                      WHERE application_name LIKE 'diesel-outbox %' AND application_name <> 'diesel-outbox bench'
                      GROUP BY datname) AS each",
        )
        .get_result(&mut self.server)?;
        Ok((counts.all, counts.most))
    }
}

impl Drop for Databases {
    fn drop(&mut self) {
        for (name, _) in &self.urls {
            let dropped =
                (self.server).batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)"));
            if let Err(error) = dropped {
                eprintln!("outbox-lab: cannot drop the database {name}: {error}");
            }
        }
        // May not exist yet.
        let _ = std::fs::remove_file(&self.file);
    }
}

/// `diesel-outbox run`, killed when dropped.
struct Program(Child);

impl Program {
    fn start(ground: &Ground, arguments: &[&str], url: Option<&Url>) -> Result<Self> {
        let program = std::env::current_exe()?.with_file_name("diesel-outbox");
        let mut command = Command::new(&program);
        command.arg("run").args(arguments).stdin(Stdio::null());
        command.envs(ground.variables());
        command.env("OUTBOX_TABLE", "outbox");
        command.env(
            "RUST_LOG",
            std::env::var("RUST_LOG").unwrap_or_else(|_| "warn".to_owned()),
        );
        if let Some(url) = url {
            command.env("DATABASE_URL", url.as_str());
        }
        let child = command.spawn();
        Ok(Self(child.with_context(|| {
            format!("cannot run {}", program.display())
        })?))
    }

    fn in_proc(&self) -> String {
        self.0.id().to_string()
    }

    fn cpu_seconds(&self) -> Result<f64> {
        cpu_seconds_of(&self.in_proc())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The sums of all rounds, and the largest sizes.
#[derive(Default)]
struct Run {
    delivered: u64,
    seconds: f64,
    cpu_seconds: f64,
    idle_cpu_seconds: f64,
    idle_memory_mib: f64,
    idle_connections: i64,
    memory_mib: f64,
    threads: f64,
    connections: i64,
    most_connections: i64,
}

impl Run {
    /// Waits until the process has its connections, and watches it.
    fn idle(
        &mut self,
        program: &Program,
        databases: &mut Databases,
        connected: i64,
        ground: &Ground,
    ) -> Result<()> {
        let began = Instant::now();
        while databases.connections()?.0 < connected {
            ensure!(began.elapsed() < PATIENCE, "the program does not connect");
            ground.wait(TICK)?;
        }
        let before = program.cpu_seconds()?;
        ground.wait(IDLE)?;
        self.idle_cpu_seconds += program.cpu_seconds()? - before;
        let memory = memory_mib_of(&program.in_proc())?;
        self.idle_memory_mib = self.idle_memory_mib.max(memory);
        self.idle_connections = self.idle_connections.max(databases.connections()?.0);
        Ok(())
    }

    /// Commits messages in these databases, and waits until all are delivered.
    fn deliver(
        &mut self,
        program: &Program,
        databases: &mut Databases,
        numbers: &[usize],
        messages: u64,
        ground: &Ground,
    ) -> Result<()> {
        let insert = "INSERT INTO outbox (message_id, topic, payload)
            SELECT gen_random_uuid(), $1, $2::json FROM generate_series(1, $3)";
        let payload = payload(ground.payload_bytes).to_string();
        let conns = numbers.iter().map(|number| databases.connect(*number));
        let mut conns = conns.collect::<Result<Vec<_>>>()?;
        for conn in &mut conns {
            conn.batch_execute("BEGIN")?;
            sql_query(insert)
                .bind::<Text, _>(TOPIC)
                .bind::<Text, _>(&payload)
                .bind::<BigInt, _>(i64::try_from(messages)?)
                .execute(conn)?;
        }
        let (cpu, began) = (program.cpu_seconds()?, Instant::now());
        for conn in &mut conns {
            conn.batch_execute("COMMIT")?;
        }
        while !conns.is_empty() {
            let mut left = Vec::new();
            for mut conn in conns {
                let is_empty = sql_query("SELECT FROM outbox LIMIT 1").execute(&mut conn)? == 0;
                if !is_empty {
                    left.push(conn);
                }
            }
            conns = left;
            let memory = memory_mib_of(&program.in_proc())?;
            let threads = threads_of(&program.in_proc())?;
            let (all, most) = databases.connections()?;
            self.memory_mib = self.memory_mib.max(memory);
            self.threads = self.threads.max(threads);
            self.connections = self.connections.max(all);
            self.most_connections = self.most_connections.max(most);
            ensure!(began.elapsed() < PATIENCE, "the messages are not delivered");
            ground.wait(TICK)?;
        }
        self.seconds += began.elapsed().as_secs_f64();
        self.cpu_seconds += program.cpu_seconds()? - cpu;
        self.delivered += messages * numbers.len() as u64;
        Ok(())
    }

    fn report(&self, databases: u64, busy: u64, rounds: u32) -> Value {
        let idle = IDLE.as_secs_f64() * f64::from(rounds);
        json!({
            "databases": databases,
            "busy": busy,
            "messages_per_second": self.delivered as f64 / self.seconds,
            "own_cpu_us_per_message": self.cpu_seconds * 1e6 / self.delivered as f64,
            "idle_cpu": self.idle_cpu_seconds / idle,
            "idle_memory_mib": self.idle_memory_mib,
            "idle_connections": self.idle_connections,
            "memory_mib": self.memory_mib,
            "threads": self.threads,
            "connections": self.connections,
            "most_connections_of_one": self.most_connections,
        })
    }
}

pub(super) fn measure(options: &Options, ground: &mut Ground) -> Result<Value> {
    let Options {
        busy,
        messages,
        rounds,
        ..
    } = *options;
    ensure!(
        busy <= options.databases,
        "more busy databases than databases"
    );
    let mut databases = Databases::create(ground, options.databases)?;
    let (mut one, mut many) = (Run::default(), Run::default());
    for round in 1..=rounds {
        ground.say(format_args!("round {round}: one database"));
        let program = Program::start(ground, &[], Some(&databases.urls[0].1))?;
        one.idle(&program, &mut databases, 2, ground)?;
        one.deliver(&program, &mut databases, &[0], messages * busy, ground)?;
        drop(program);
        ground.say(format_args!(
            "round {round}: {} databases",
            options.databases
        ));
        let file = databases.file.to_string_lossy().into_owned();
        let program = Program::start(ground, &["--databases", &file], None)?;
        let connected = i64::try_from(options.databases)?;
        many.idle(&program, &mut databases, connected, ground)?;
        // Neither the first, whose lease of the killed program may not have expired, nor neighbours.
        let numbers = (1..=busy).map(|number| (number * options.databases / (busy + 1)) as usize);
        let numbers: Vec<usize> = numbers.collect();
        many.deliver(&program, &mut databases, &numbers, messages, ground)?;
        drop(program);
    }
    Ok(json!({
        "messages": messages * busy,
        "rounds": rounds,
        "rate_ratio": (many.delivered as f64 / many.seconds) / (one.delivered as f64 / one.seconds),
        "runs": [one.report(1, 1, rounds), many.report(options.databases, busy, rounds)],
    }))
}

pub(super) const COLUMNS: &[Column] = &[
    ("databases", "databases", Unit::Count),
    ("busy", "busy", Unit::Count),
    ("delivered/s", "messages_per_second", Unit::Count),
    OWN_CPU,
    ("CPU when idle", "idle_cpu", Unit::Percent),
    ("memory when idle", "idle_memory_mib", Unit::Mebibytes),
    ("connections when idle", "idle_connections", Unit::Count),
    ("memory", "memory_mib", Unit::Mebibytes),
    ("threads", "threads", Unit::Count),
    ("connections", "connections", Unit::Count),
    (
        "most of one database",
        "most_connections_of_one",
        Unit::Count,
    ),
];
