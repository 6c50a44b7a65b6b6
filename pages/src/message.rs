//! What the records and the history of a message say, for the pages and the commands of the program.

use diesel_outbox::program::{HistoryEntry, KeptIn, MessageRecord};

/// Who cancelled a message if no operator did (`Outbox::cancel`).
pub const APPLICATION: &str = "the application";

/// The event of a replay in the history, and the word for it.
pub const REPLAYED: &str = "replayed";

/// Whether the record is the ledger entry of a dead letter, which has more details.
pub fn is_said_by_a_dead_letter(record: &MessageRecord, all: &[MessageRecord]) -> bool {
    let is_of_it = |other: &&MessageRecord| {
        (other.sequence, other.message_id) == (record.sequence, record.message_id)
    };
    let mut of_it = all.iter().filter(is_of_it);
    let is_the_last = !all
        .iter()
        .filter(is_of_it)
        .any(|other| other.kept_in == KeptIn::Ledger && other.settled_at > record.settled_at);
    record.kept_in == KeptIn::Ledger
        && is_the_last
        && of_it.any(|other| other.kept_in == KeptIn::Dead)
}

/// Whether the history records the replay that enqueued this message, and by whom.
pub fn is_said_to_be_replayed(record: &MessageRecord, history: &[HistoryEntry]) -> bool {
    let identity = (record.sequence, record.message_id);
    let is_of_it = |entry: &&HistoryEntry| (entry.sequence, entry.message_id) == identity;
    let mut of_it = history.iter().filter(is_of_it);
    of_it.any(|entry| entry.event == REPLAYED)
}

/// ` for billing`, or nothing if there is no destination.
pub fn for_destination(destination: &str) -> String {
    match destination {
        "" => String::new(),
        destination => format!(" for {destination}"),
    }
}

/// An entry of the history, in words.
pub fn sentence(entry: &HistoryEntry) -> String {
    match in_two(entry) {
        (what, more) if more.is_empty() => what,
        (what, more) => format!("{what}: {more}"),
    }
}

/// What has happened, and more about it.
pub(crate) fn in_two(entry: &HistoryEntry) -> (String, String) {
    let to = for_destination(&entry.destination);
    if entry.event != "failed" {
        let by = entry.operator.as_deref().map(|who| format!(" by {who}"));
        let by = by.unwrap_or_default();
        let error = entry.error.as_deref().unwrap_or_default();
        let nothing = String::new();
        return match entry.event.as_str() {
            "repeated" => {
                let more = format!("{error} (message {})", entry.sequence);
                (format!("not sent again{to}"), more)
            }
            "conflict" => (format!("result discarded{to}"), error.to_owned()),
            REPLAYED => (format!("{REPLAYED}{to} as {}{by}", entry.sequence), nothing),
            event => (format!("{event}{to}{by}"), nothing),
        };
    }
    let reason = entry.reason.as_deref().unwrap_or_default();
    let error = entry.error.as_deref().unwrap_or_default();
    let what = format!("attempt {} failed{to}", entry.attempt.unwrap_or_default());
    let mut more = format!("{reason} ({error})");
    if let Some(took) = entry.took {
        more += &format!(", after {} ms", took.as_millis());
    }
    if let Some(relay) = &entry.relay {
        more += &format!(", by the relay {relay}");
    }
    (what, more)
}
