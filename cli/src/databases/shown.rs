//! What `/metrics` and `/readyz` show of many databases.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use diesel_outbox_pages::Readiness;

/// The served databases.
///
/// The recorder forgets nothing. So what nobody measures any more is left out when the metrics are shown: all metrics of a
/// database that is not served any more, and the gauges of a relay that has ended.
#[derive(Default)]
pub(super) struct Shown {
    databases: Mutex<BTreeMap<String, Arc<Shows>>>,
    is_ending: AtomicBool,
}

/// What its thread knows of a database.
#[derive(Default)]
pub(super) struct Shows {
    /// Whether a relay runs now.
    pub(super) has_relay: AtomicBool,
    /// Whether the database can be served.
    pub(super) is_ready: AtomicBool,
}

impl Shown {
    /// These databases are served, and no others.
    pub(super) fn serve<'a>(&self, all: impl Iterator<Item = (&'a str, &'a Arc<Shows>)>) {
        *self.databases() = all
            .map(|(name, shows)| (name.to_owned(), Arc::clone(shows)))
            .collect();
    }

    /// The process ends.
    pub(super) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    /// A process that serves some of its databases is ready: a tenant whose database is down must not take the process
    /// from the others.
    pub(super) fn readiness(&self) -> Readiness {
        let databases = self.databases();
        let is_down = |shows: &Shows| !shows.is_ready.load(Ordering::Acquire);
        let down = databases.iter().filter(|(_, shows)| is_down(shows));
        let down: Vec<&str> = down.map(|(name, _)| name.as_str()).collect();
        let served = databases.len() - down.len();
        let count = format!("serving {served} of {} databases", databases.len());
        let (is_ready, summary) = match served {
            _ if self.is_ending.load(Ordering::Acquire) => (false, "shutting down".to_owned()),
            0 => (false, count),
            _ if down.is_empty() => (true, "ok".to_owned()),
            _ => (true, format!("ok: {count}")),
        };
        Readiness {
            is_ready,
            summary,
            details: match down.is_empty() {
                true => String::new(),
                false => format!("not served: {}", down.join(", ")),
            },
        }
    }

    /// The text without what nobody measures.
    pub(super) fn measured(&self, text: &str) -> String {
        let databases = self.databases();
        let mut is_gauge = false;
        let is_measured = |line: &&str| {
            if line.starts_with("# TYPE ") {
                is_gauge = line.trim_end().ends_with(" gauge");
            }
            let Some(name) = database(line) else {
                return true;
            };
            databases.get(name).is_some_and(|shows| {
                // This gauge is set without a relay, too.
                let is_of_relay = is_gauge && !line.starts_with("diesel_outbox_ready{");
                !is_of_relay || shows.has_relay.load(Ordering::Acquire)
            })
        };
        text.split_inclusive('\n').filter(is_measured).collect()
    }

    fn databases(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Shows>>> {
        self.databases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The database of a sample, whose label is `NAME:OUTBOX`. A name has no character that is escaped.
fn database(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("{outbox=\"")?;
    let (label, _) = rest.split_once('"')?;
    Some(label.rsplit_once(':')?.0)
}
