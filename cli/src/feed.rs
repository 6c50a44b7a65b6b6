//! `diesel-outbox feed`

use std::io::Write;
use std::time::{Duration, SystemTime};

use anyhow::{Result, bail};
use diesel::PgConnection;
use diesel_outbox::ConfigError;
use diesel_outbox::config::Config;
use diesel_outbox::program::{
    self, After, Discontinued, FeedAccess, FeedQuery, FeedState, Feeds, ReaderState, WhichFeeds,
    parse_duration,
};
use secrecy::ExposeSecret;
use serde_json::{Value, json};

use crate::connection::connect;
use crate::output;
use crate::settings::SettingFlags;
use crate::signed::Signed;

/// The actions of `feed`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List feeds, and how far they are read
    List {
        /// Print the feeds as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a feed and its readers
    Show {
        /// Name of the feed
        name: String,
        /// Print the feed as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print events of a feed, one JSON document in each line, and at the end the cursor behind them on standard error
    Read {
        /// Name of the feed
        name: String,
        /// Where to begin: begin, end, a cursor, a time (2026-11-21T10:00:00Z), or 2h for two hours ago
        #[arg(long, value_name = "CURSOR", default_value = "begin")]
        after: String,
        /// Most events
        #[arg(long, value_name = "COUNT", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        limit: u32,
    },
    /// Make a token for a feed's readers and print it: it is not shown again. Older tokens end after a while
    Token {
        /// Name of the feed
        name: String,
        /// Time until older tokens end
        #[arg(long, value_name = "DURATION", default_value = "24h")]
        keep: String,
        #[command(flatten)]
        signed: Signed,
    },
}

/// The most events of one query.
const PAGE: u32 = 1_000;

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let mut conn = connect(&config, "feed", Duration::from_secs(30))?;
    let (conn, feeds) = (&mut conn, Feeds::of(&config.table));
    match action {
        Action::List { json } => list(&feeds.states(conn, WhichFeeds::default())?, *json),
        Action::Show { name, json } => {
            let found = feeds.states(conn, WhichFeeds::named(&[name]))?;
            found
                .first()
                .map_or_else(|| missing(name), |state| show(state, *json))
        }
        Action::Read { name, after, limit } => {
            read(conn, &config, name, self::after(after)?, *limit)
        }
        Action::Token { name, keep, signed } => {
            let keep = parse_duration("--keep", keep)?;
            let made = program::make_feed_token(conn, &config.table, name, keep, &signed.note())?;
            match made {
                Some(token) => output::line(token.expose_secret()),
                None => missing(name),
            }
        }
    }
}

fn missing(name: &str) -> Result<()> {
    bail!(
        "there is no feed {name:?}: `diesel-outbox feed list` shows all of them, and `endpoint put NAME --feed` makes one"
    )
}

/// The value of `--after`.
pub(crate) fn after(text: &str) -> Result<After> {
    let after = text.parse::<After>();
    let after = after.or_else(|error| match program::parse_time(text) {
        // A time before now, too, such as 2h.
        Ok(time) => Ok(After::Time(time)),
        Err(_) => Err(ConfigError::new("--after", error.to_string())),
    });
    Ok(after?)
}

fn read(
    conn: &mut PgConnection,
    config: &Config,
    feed: &str,
    mut after: After,
    limit: u32,
) -> Result<()> {
    let (feeds, mut left) = (Feeds::of(&config.table), limit);
    let mut out = std::io::stdout().lock();
    loop {
        let asked = FeedQuery::now(after, left.min(PAGE));
        let Some((_, page)) = feeds.read(conn, FeedAccess::All, feed, asked)? else {
            return missing(feed);
        };
        let page = match page {
            Ok(page) => page,
            Err(Discontinued::Expired { first_position }) => bail!(
                "the events behind this cursor were removed: the first one has the position {first_position} (--after begin)"
            ),
            Err(Discontinued::Changed { last_position }) => bail!(
                "the feed has another event at this cursor, or none: its database was restored, and its last position is {last_position} (--after TIME)"
            ),
        };
        let documents: Vec<Box<serde_json::value::RawValue>> =
            serde_json::from_str(&program::as_batch(config, &page))?;
        for document in &documents {
            writeln!(out, "{}", document.get())?;
        }
        left -= u32::try_from(page.events.len()).unwrap_or(left).min(left);
        if page.events.is_empty() || left == 0 {
            out.flush()?;
            eprintln!("next: {}", page.next);
            return Ok(());
        }
        after = After::Cursor(page.next);
    }
}

fn list(feeds: &[FeedState], as_json: bool) -> Result<()> {
    if as_json {
        let all: Vec<Value> = feeds.iter().map(shown).collect();
        return output::json(&json!({ "feeds": all }));
    }
    if feeds.is_empty() {
        return output::line(
            "there are no feeds: `diesel-outbox endpoint put NAME --feed` makes one",
        );
    }
    feeds.iter().try_for_each(|one| output::line(line(one)))
}

fn show(state: &FeedState, as_json: bool) -> Result<()> {
    if as_json {
        return output::json(&shown(state));
    }
    output::line(line(state))?;
    for reader in &state.readers {
        output::line(format!("  {}", of_reader(reader)))?;
    }
    if state.readers.is_empty() {
        let name = output::shown(&state.name);
        output::line(format!(
            "  no token: `diesel-outbox feed token {name}` makes one"
        ))?;
    }
    Ok(())
}

fn line(state: &FeedState) -> String {
    let kept = match state.last_position >= state.first_position {
        true => format!(
            "positions {} to {}",
            state.first_position, state.last_position
        ),
        false => "no events".to_owned(),
    };
    let whose = match (state.tenant_id, state.is_of_endpoint) {
        (Some(tenant), _) => format!(", of the tenant {tenant}"),
        (None, true) => String::new(),
        (None, false) => ", of the settings".to_owned(),
    };
    let unread = match state.unread() {
        0 => "all read".to_owned(),
        unread => format!("{unread} not read"),
    };
    format!("{}{whose}: {kept}, {unread}", output::shown(&state.name))
}

fn of_reader(reader: &ReaderState) -> String {
    let since = time(reader.created_at);
    let until =
        (reader.valid_until).map_or(String::new(), |at| format!(", valid until {}", time(at)));
    let read = match (reader.last_position, reader.last_read_at) {
        (Some(position), Some(at)) => format!("has read up to {position} at {}", time(at)),
        _ => "has read nothing".to_owned(),
    };
    format!("token of {since}{until}: {read}")
}

fn time(at: SystemTime) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_seconds(at)
}

fn shown(state: &FeedState) -> Value {
    let at = |at: Option<SystemTime>| at.map(|at| time(at).to_string());
    let reader = |one: &ReaderState| {
        json!({
            "created_at": at(Some(one.created_at)),
            "valid_until": at(one.valid_until),
            "last_position": one.last_position,
            "last_read_at": at(one.last_read_at),
        })
    };
    json!({
        "name": state.name,
        "tenant_id": state.tenant_id,
        "of_endpoint": state.is_of_endpoint,
        "first_position": state.first_position,
        "last_position": state.last_position,
        "lag_events": state.unread(),
        "lag_seconds": state.lag.map(|lag| lag.as_secs_f64()),
        "readers": state.readers.iter().map(reader).collect::<Vec<_>>(),
    })
}
