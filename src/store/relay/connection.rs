//! A connection of the relay: it has a name and limits on every statement, and quickly notices a lost server.

use std::sync::Arc;
use std::time::Duration;

use diesel::connection::{CacheSize, SimpleConnection};
use diesel::dsl::exists;
use diesel::r2d2::ManageConnection;
use diesel::result::QueryResult;
use diesel::sql_types::Text;
use diesel::{Connection, ExpressionMethods, PgConnection, QueryDsl, RunQueryDsl, select};
use secrecy::{ExposeSecret, SecretString};

use crate::error::DatabaseError;
use crate::store::catalogue::pg_stat_activity;
use crate::store::sql::pg_backend_pid;
use crate::store::statement::statement_anew;

/// libpq's parameters, used if the URL does not set them. A dead server is noticed after at most 20 s of silence, and
/// sooner while data is being sent.
const PARAMETERS: &[(&str, &str)] = &[
    ("connect_timeout", "5"),
    ("keepalives_idle", "10"),
    ("keepalives_interval", "5"),
    ("keepalives_count", "2"),
    ("tcp_user_timeout", "20000"),
];

/// How long a relay's transaction may wait for its next statement. A relay that is stopped or cut off during a
/// transaction holds rows and the lock of keyed claims for at most this time.
const LONGEST_IDLE: Duration = Duration::from_secs(2);

/// Where a relay's connections come from.
#[derive(Clone)]
pub(crate) enum Source {
    Url(SecretString),
    Manager(Arc<dyn Manager>),
}

/// An r2d2 connection manager with any error type.
pub(crate) trait Manager: Send + Sync {
    fn connect(&self) -> Result<PgConnection, DatabaseError>;

    /// Whether the connection still works. Asks the server.
    fn is_valid(&self, conn: &mut PgConnection) -> bool;

    /// Whether the connection is known to be broken.
    fn has_broken(&self, conn: &mut PgConnection) -> bool;
}

impl<M: ManageConnection<Connection = PgConnection>> Manager for M {
    fn connect(&self) -> Result<PgConnection, DatabaseError> {
        ManageConnection::connect(self)
            .map_err(|error| DatabaseError::Connect(format!("connection manager: {error}")))
    }

    fn is_valid(&self, conn: &mut PgConnection) -> bool {
        ManageConnection::is_valid(self, conn).is_ok()
    }

    fn has_broken(&self, conn: &mut PgConnection) -> bool {
        ManageConnection::has_broken(self, conn)
    }
}

impl Source {
    /// Connects; by a URL, as [`connect`] does. A manager's connection gets the same settings, except those that only
    /// a URL can set: how soon the connection notices a lost server.
    pub(crate) fn connect(
        &self,
        purpose: &str,
        limits: Limits,
    ) -> Result<Connected, DatabaseError> {
        match self {
            Self::Url(url) => connect(url, purpose, limits),
            Self::Manager(manager) => {
                let mut conn = manager.connect()?;
                limits.set(&mut conn, purpose)?;
                Ok(Connected { conn, pooled: None })
            }
        }
    }
}

/// A connection, and whether a pooler is between it and the server.
pub(crate) struct Connected {
    pub(crate) conn: PgConnection,
    /// Set behind a pooler that gives each transaction another connection: settings last no longer than a
    /// transaction.
    pub(crate) pooled: Option<Limits>,
}

/// The limits of each statement, and the planner's settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    statement_timeout: Duration,
    /// How long a transaction may wait for its next statement.
    longest_idle: Duration,
    plans: Plans,
}

/// How the server finds rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plans {
    /// By any plan of the server's choice.
    Any,
    /// Always by an index, with one plan for all values. A prepared statement keeps its plan, which may be wrong once
    /// the table has grown. A new plan for each claim would cost a tenth of the claim, and more in a large table.
    ByIndex,
}

/// How long a statement with this timeout may wait for a lock.
pub(crate) fn lock_limit(statement_timeout: Duration) -> Duration {
    statement_timeout / 2
}

impl Limits {
    /// The limits of a relay's threads.
    pub(crate) fn of_relay(statement_timeout: Duration, plans: Plans) -> Self {
        Self {
            statement_timeout,
            longest_idle: LONGEST_IDLE,
            plans,
        }
    }

    /// The limits of a connection whose transactions belong to the caller.
    pub(crate) fn of_caller(statement_timeout: Duration) -> Self {
        Self {
            statement_timeout,
            longest_idle: statement_timeout.saturating_add(Duration::from_secs(10)),
            plans: Plans::Any,
        }
    }

    /// Merge joins are off: they would read the primary key from the first to the last of a few scattered sequences.
    /// JIT is off: the planner overestimates the cost of a claim, and would compile for seconds for a claim of
    /// milliseconds. Row security is off: a policy that would hide rows is an error, not an empty outbox.
    fn settings(self) -> [(&'static str, String); 10] {
        let (other_plans, plan_cache_mode) = match self.plans {
            Plans::Any => ("on", "auto"),
            Plans::ByIndex => ("off", "force_generic_plan"),
        };
        let timeout = crate::store::millis(self.statement_timeout).max(1);
        let lock_timeout = crate::store::millis(lock_limit(self.statement_timeout)).max(1);
        [
            ("statement_timeout", timeout.to_string()),
            ("lock_timeout", lock_timeout.to_string()),
            (
                "idle_in_transaction_session_timeout",
                crate::store::millis(self.longest_idle).to_string(),
            ),
            ("enable_mergejoin", "off".to_owned()),
            ("enable_bitmapscan", other_plans.to_owned()),
            ("enable_seqscan", other_plans.to_owned()),
            ("plan_cache_mode", plan_cache_mode.to_owned()),
            ("jit", "off".to_owned()),
            ("row_security", "off".to_owned()),
            ("client_min_messages", "warning".to_owned()),
        ]
    }

    /// Sets the limits and the connection's name until the connection closes.
    fn set(self, conn: &mut PgConnection, purpose: &str) -> QueryResult<()> {
        let set = |(name, value)| format!("SET {name} = {value};");
        let settings: String = self.settings().into_iter().map(set).collect();
        conn.batch_execute(&format!(
            "{settings} SET application_name = 'diesel-outbox {purpose}';
             SET default_transaction_isolation = 'read committed'"
        ))
    }

    /// Sets the limits for the transaction that has just begun.
    pub(crate) fn set_local(self, conn: &mut PgConnection) -> QueryResult<()> {
        let set = |(name, value)| format!("SET LOCAL {name} = {value};");
        let settings: String = self.settings().into_iter().map(set).collect();
        conn.batch_execute(&format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL search_path = {}; {settings}",
            crate::store::pinned::PATH
        ))
    }
}

/// Connects. `purpose` appears in `pg_stat_activity`. No statement runs longer than its limit, or waits for a lock
/// longer than half the limit.
///
/// Behind a pooler in transaction mode nothing is set, because other clients would get the settings too, and no
/// statement is prepared by name.
pub(crate) fn connect(
    database_url: &SecretString,
    purpose: &str,
    limits: Limits,
) -> Result<Connected, DatabaseError> {
    let url = database_url.expose_secret();
    if url.contains("options=") {
        // libpq uses only one `options`: the URL's. No pooler that accepts options shares connections by transaction.
        let mut conn = establish(url, &[])?;
        limits.set(&mut conn, purpose)?;
        return Ok(Connected { conn, pooled: None });
    }
    let option = |(name, value)| format!("-c {name}={value}");
    let mut options: Vec<String> = limits.settings().into_iter().map(option).collect();
    options.push("-c default_transaction_isolation=read\\ committed".to_owned());
    let name = format!("diesel-outbox {purpose}");
    let of_ours = [("options", options.join(" ")), ("application_name", name)];
    let is_refused = |error: &DatabaseError| error.to_string().contains("startup parameter");
    let mut conn = match establish(url, &of_ours) {
        Ok(conn) => conn,
        Err(error) if is_refused(&error) => {
            return Ok(behind_pooler(establish(url, &[])?, limits));
        }
        Err(error) => return Err(error),
    };
    if !are_set(&mut conn, limits.statement_timeout)? {
        return Ok(behind_pooler(conn, limits));
    }
    Ok(Connected { conn, pooled: None })
}

fn behind_pooler(mut conn: PgConnection, limits: Limits) -> Connected {
    conn.set_prepared_statement_cache_size(CacheSize::Disabled);
    let pooled = Some(limits);
    Connected { conn, pooled }
}

/// Whether the server has the settings that were requested on connecting.
///
/// Text: it queries PostgreSQL's catalogue, and nothing may be prepared by name yet.
fn are_set(conn: &mut PgConnection, statement_timeout: Duration) -> QueryResult<bool> {
    let timeout = crate::store::millis(statement_timeout).max(1);
    let setting: String = statement_anew(
        "SELECT setting FROM pg_catalog.pg_settings
          WHERE name OPERATOR(pg_catalog.=) 'statement_timeout'",
    )
    .giving::<Text>()
    .get_result(conn)?;
    Ok(setting == timeout.to_string())
}

fn establish(
    database_url: &str,
    parameters: &[(&str, String)],
) -> Result<PgConnection, DatabaseError> {
    let url = with_parameters(database_url, parameters);
    PgConnection::establish(&url).map_err(|error| {
        let error = without_password(&error.to_string(), database_url);
        let lines: Vec<&str> = error.lines().map(str::trim).collect();
        DatabaseError::Connect(lines.join("; "))
    })
}

/// The server process of a connection.
pub(crate) fn backend(conn: &mut PgConnection) -> QueryResult<i32> {
    select(pg_backend_pid()).get_result(conn)
}

/// Whether this server process still exists: it may finish a statement whose client is gone.
pub(crate) fn is_at_work(conn: &mut PgConnection, backend: i32) -> QueryResult<bool> {
    let found = pg_stat_activity::table.filter(pg_stat_activity::pid.eq(backend));
    select(exists(found)).get_result(conn)
}

/// Puts our parameters, and `parameters`, before those of the URL: libpq uses the last of several values.
pub(super) fn with_parameters(database_url: &str, parameters: &[(&str, String)]) -> String {
    let is_url = ["postgres://", "postgresql://"]
        .iter()
        .any(|scheme| database_url.starts_with(scheme));
    let separator = if is_url { "&" } else { " " };
    let written = |value: &str| {
        if is_url {
            value
                .replace('%', "%25")
                .replace('\\', "%5C")
                .replace(' ', "%20")
                .replace('=', "%3D")
        } else {
            format!("'{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
        }
    };
    let fixed = PARAMETERS.iter().map(|(name, value)| (*name, *value));
    let more = parameters
        .iter()
        .map(|(name, value)| (*name, value.as_str()));
    let ours = fixed
        .chain(more)
        .map(|(name, value)| format!("{name}={}", written(value)))
        .collect::<Vec<_>>()
        .join(separator);
    if !is_url {
        return format!("{ours} {database_url}");
    }
    match database_url.split_once('?') {
        None => format!("{database_url}?{ours}"),
        Some((before, "")) => format!("{before}?{ours}"),
        Some((before, theirs)) => format!("{before}?{ours}&{theirs}"),
    }
}

/// Hides the password in a libpq error. libpq quotes text that it cannot read, and takes part of a password with an
/// unencoded `/` or `@` for something else. Every quoted piece that may belong to the password is hidden.
pub(super) fn without_password(error: &str, database_url: &str) -> String {
    let secret = password_of(database_url);
    let touches_secret = |piece: &str| {
        !secret.is_empty()
            && database_url
                .match_indices(piece)
                .any(|(at, _)| at < secret.end && at + piece.len() > secret.start)
    };
    error
        .split('"')
        .map(|piece| {
            let is_secret = !piece.is_empty() && (piece.contains('@') || touches_secret(piece));
            if is_secret { "***" } else { piece }
        })
        .collect::<Vec<_>>()
        .join("\"")
}

/// The range that contains the password. In a URL: from the end of the user to the last `@`. In parameters and pairs:
/// from `password` to the end. In anything else: the whole text.
fn password_of(database_url: &str) -> std::ops::Range<usize> {
    if let Some((scheme, rest)) = database_url.split_once("://")
        && !scheme.contains('=')
    {
        if let Some(parameter) = rest.find("password=") {
            let user = rest.find(':').unwrap_or(rest.len()).min(parameter);
            return database_url.len() - rest.len() + user..database_url.len();
        }
        let begin = scheme.len() + "://".len();
        let user = rest.find(':').unwrap_or(rest.len());
        let at = rest.rfind('@').unwrap_or(0);
        return begin + user..begin + at.max(user);
    }
    let begin = match database_url.find("password") {
        Some(begin) => begin,
        None if database_url.contains('=') => database_url.len(),
        None => 0,
    };
    begin..database_url.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_the_password_is_hidden_and_other_pieces_are_shown() {
        for (url, error, shown) in [
            (
                "postgres://u:se/kret@db/shop",
                r#"invalid integer value "se" for connection option "port""#,
                r#"invalid integer value "***" for connection option "port""#,
            ),
            (
                "postgres://u:se@kret@db/shop",
                r#"could not translate host name "kret@db" to address"#,
                r#"could not translate host name "***" to address"#,
            ),
            (
                "host=db password=se kret",
                r#"missing "=" after "kret" in connection info string"#,
                r#"missing "***" after "***" in connection info string"#,
            ),
            (
                "postgres://u:sekret@db/shop",
                r#"connection to server at "db", port 5432 failed: FATAL: role "u" does not exist"#,
                r#"connection to server at "db", port 5432 failed: FATAL: role "u" does not exist"#,
            ),
            (
                "sekret",
                r#"missing "=" after "sekret" in connection info string"#,
                r#"missing "=" after "***" in connection info string"#,
            ),
            (
                "postgres://db/shop",
                r#"could not translate host name "db" to address"#,
                r#"could not translate host name "db" to address"#,
            ),
        ] {
            assert_eq!(without_password(error, url), shown);
        }
    }

    #[test]
    fn the_users_parameters_come_last_and_win() {
        let url = with_parameters("postgres://db/shop?connect_timeout=9", &[]);
        assert!(
            url.starts_with("postgres://db/shop?connect_timeout=5&"),
            "{url}"
        );
        assert!(url.ends_with("&connect_timeout=9"), "{url}");
        assert!(with_parameters("host=db", &[]).ends_with(" host=db"));
        assert!(with_parameters("postgres://db/shop", &[]).contains("shop?connect_timeout=5"));
    }

    #[test]
    fn values_are_written_as_each_form_wants_them() {
        let options = [("options", "-c a=b\\ c".to_owned())];
        let url = with_parameters("postgres://db/shop", &options);
        assert!(url.ends_with("&options=-c%20a%3Db%5C%20c"), "{url}");
        let pairs = with_parameters("host=db", &options);
        assert!(pairs.contains(r"options='-c a=b\\ c' "), "{pairs}");
    }

    #[test]
    fn a_managers_connection_has_the_settings_that_a_url_gives() {
        let url = std::env::var("DATABASE_URL")
            .expect("DATABASE_URL is set: run `make test`, or `scripts/with-postgres cargo test`");
        let manager = diesel::r2d2::ConnectionManager::<PgConnection>::new(&url);
        let limits = Limits::of_relay(Duration::from_millis(7_654), Plans::ByIndex);
        let settings = |source: Source| {
            let connected = source.connect("test", limits).expect("connected");
            assert!(connected.pooled.is_none());
            let mut conn = connected.conn;
            let names = limits.settings().map(|(name, _)| name).into_iter();
            let names = names.chain(["application_name", "default_transaction_isolation"]);
            let value = |name: &str| -> String {
                select(crate::store::sql::current_setting(name))
                    .get_result(&mut conn)
                    .expect("a setting")
            };
            names.map(value).collect::<Vec<_>>()
        };
        let managed = settings(Source::Manager(Arc::new(manager)));
        assert_eq!(managed, settings(Source::Url(url.into())));
        assert!(managed.contains(&"7654ms".to_owned()), "{managed:?}");
    }
}
