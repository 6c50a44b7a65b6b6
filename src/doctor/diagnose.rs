//! The doctor: finds what is wrong with an outbox and its database, or soon will be, and says what to do.

mod health;
mod schema;
mod server;

use std::time::Duration;

use diesel::PgConnection;
use diesel::result::{DatabaseErrorKind, Error, QueryResult};

use crate::config::Config;
use crate::error::DatabaseError;
use crate::sql::looking::looking;
use crate::sql::pinned::pinned;
use crate::words::words;

words! {
    /// How bad a finding is.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum Severity {
        /// Nothing is wrong.
        Ok = "ok",
        /// The check could not run, for example because the role lacks rights.
        Skipped = "skipped",
        /// The outbox works, but not as well as it could, or not for long.
        Warning = "warning",
        /// The outbox does not work, or data can be lost.
        Error = "error",
    }
}

/// One finding of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The name of the check: `indexes`, `vacuum`, `snapshots`, …
    pub check: &'static str,
    /// How bad the finding is.
    pub severity: Severity,
    /// What was found, as a sentence.
    pub what: String,
    /// What to do: SQL, a command or a setting.
    pub advice: Option<String>,
}

/// Collects the findings of one check.
struct Findings {
    check: &'static str,
    all: Vec<Finding>,
}

impl Findings {
    fn new(check: &'static str) -> Self {
        let all = Vec::new();
        Self { check, all }
    }

    fn add(&mut self, severity: Severity, what: String, advice: Option<String>) {
        let check = self.check;
        self.all.push(Finding {
            check,
            severity,
            what,
            advice,
        });
    }

    fn warning(&mut self, what: String, advice: impl Into<String>) {
        self.add(Severity::Warning, what, Some(advice.into()));
    }

    fn error(&mut self, what: String, advice: impl Into<String>) {
        self.add(Severity::Error, what, Some(advice.into()));
    }

    /// Without any finding, the check is ok.
    fn or_ok(mut self, what: impl Into<String>) -> Vec<Finding> {
        if self.all.is_empty() {
            self.add(Severity::Ok, what.into(), None);
        }
        self.all
    }
}

/// Runs all checks of the doctor.
///
/// The checks cover the schema and its indexes, vacuum and what holds vacuum back, clocks, sequences and
/// transaction ids, connections, settings of the role, who can create objects in its search path, a pooler,
/// leases, rows that are kept too long, and disabled endpoints. A check for which the role lacks
/// rights is [`Skipped`](Severity::Skipped), and no error.
///
/// Nothing is changed. To compare the schema, a second outbox is created in a transaction that is rolled back,
/// if the role may create one.
///
/// # Errors
/// A [`DatabaseError`] if the connection is lost, or if the outbox is missing or damaged.
pub fn diagnose(conn: &mut PgConnection, config: &Config) -> Result<Vec<Finding>, DatabaseError> {
    super::migrations::check_schema(conn, &config.table)?;
    let mut findings = Vec::new();
    type DiagnosisCheck = fn(&mut PgConnection, &Config) -> QueryResult<Vec<Finding>>;
    let checks: [(&'static str, DiagnosisCheck); 18] = [
        ("drift", schema::drift),
        ("indexes", schema::indexes),
        ("vacuum", health::vacuum),
        ("snapshots", health::snapshots),
        ("sequence", health::sequence),
        ("inserts", health::inserts),
        ("leases", health::leases),
        ("ledger", health::ledger),
        ("inbox", health::inbox),
        ("endpoints", health::endpoints),
        ("feeds", health::feeds),
        ("topics", health::topics),
        ("agreement", health::agreement),
        ("clock", server::clock),
        ("wraparound", server::wraparound),
        ("connections", server::connections),
        ("settings", server::settings),
        ("search_path", server::search_path),
    ];
    for (check, look) in checks {
        let looked = pinned(conn, &config.table, |conn, name| {
            let config = Config {
                table: name.clone(),
                ..config.clone()
            };
            looking(conn, None, |conn| look(conn, &config))
        });
        match looked {
            Ok(found) => findings.extend(found),
            Err(error) if is_lost(&error) => return Err(error.into()),
            Err(error) => {
                let mut found = Findings::new(check);
                found.add(
                    Severity::Skipped,
                    format!("could not be checked: {error}"),
                    None,
                );
                findings.extend(found.all);
            }
        }
    }
    findings.extend(server::pooler(config));
    Ok(findings)
}

fn is_lost(error: &Error) -> bool {
    use DatabaseErrorKind::{ClosedConnection, UnableToSendCommand};
    matches!(
        error,
        Error::DatabaseError(ClosedConnection | UnableToSendCommand, _)
    )
}

/// Formats seconds in the unit that suits their size.
fn ago(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3_600.0),
        s => format!("{:.0} d", s / 86_400.0),
    }
}

/// Formats the duration of a setting in the same way.
fn span(duration: Duration) -> String {
    ago(duration.as_secs_f64())
}
