//! What `/metrics` shows of many databases.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Whether a relay runs for each of the served databases.
///
/// The recorder forgets nothing. So what nobody measures any more is left out when the metrics are shown: all metrics of a
/// database that is not served any more, and the gauges of a relay that has ended.
#[derive(Default)]
pub(super) struct Relays(Mutex<HashMap<String, Arc<AtomicBool>>>);

impl Relays {
    /// These databases are served, and no others.
    pub(super) fn serve<'a>(&self, all: impl Iterator<Item = (&'a str, &'a Arc<AtomicBool>)>) {
        let all = all.map(|(name, has_relay)| (name.to_owned(), Arc::clone(has_relay)));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = all.collect();
    }

    /// The text without what nobody measures.
    pub(super) fn measured(&self, text: &str) -> String {
        let relays = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_gauge = false;
        let is_measured = |line: &&str| {
            if line.starts_with("# TYPE ") {
                is_gauge = line.trim_end().ends_with(" gauge");
            }
            let Some(name) = database(line) else {
                return true;
            };
            relays.get(name).is_some_and(|has_relay| {
                // This gauge is set without a relay, too.
                let is_of_relay = is_gauge && !line.starts_with("diesel_outbox_ready{");
                !is_of_relay || has_relay.load(Ordering::Acquire)
            })
        };
        text.split_inclusive('\n').filter(is_measured).collect()
    }
}

/// The database of a sample, whose label is `NAME:OUTBOX`. A name has no character that is escaped.
fn database(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("{outbox=\"")?;
    let (label, _) = rest.split_once('"')?;
    Some(label.rsplit_once(':')?.0)
}
