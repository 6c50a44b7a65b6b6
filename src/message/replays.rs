//! Idempotency keys of replays: `order-1#replay-20261121T101500-5f3a9c` is the key of a replay of `order-1`.
//!
//! The key tells a run what it has replayed before, and the replay from the message that was delivered. Receivers and
//! handlers see the key of the first message, because a replay is the same message. A replay with a new id is another
//! message, and keeps its own key: `order-1#replay-20261121T101500-5f3a9c+new`.

/// The text between the key of a message and the name of the run that replayed the message.
const MARK: &str = "#replay-";

/// The first text after all texts that begin with [`MARK`]: `.` follows `-`.
const AFTER_MARK: &str = "#replay.";

/// The end of the key of a replay with a new id.
const NEW: &str = "+new";

/// The most characters in the name of a run. With mark and end, the table takes keys of replays of any key.
pub(crate) const LONGEST_RUN: usize = 22;

/// The key of a message in a replay. A replay of a replay gets the key of a replay of the first message.
pub(crate) fn replayed(key: &str, run: &str, has_new_id: bool) -> String {
    let end = if has_new_id { NEW } else { "" };
    format!("{}{MARK}{run}{end}", base_of(key).unwrap_or(key))
}

/// The range of the keys of a message's replays: from the first text, and before the second.
pub(crate) fn keys_of_replays(key: &str) -> (String, String) {
    (format!("{key}{MARK}"), format!("{key}{AFTER_MARK}"))
}

/// The key at the beginning of a replay's key. `None`: this is not the key of a replay.
pub(crate) fn base_of(key: &str) -> Option<&str> {
    same_message(key.strip_suffix(NEW).unwrap_or(key))
}

/// The key of the message that a replay sends again. `None`: the key belongs to the message itself.
pub(crate) fn same_message(key: &str) -> Option<&str> {
    let (base, run) = key.rsplit_once(MARK)?;
    let is_run = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_replay = (1..=LONGEST_RUN).contains(&run.len()) && run.bytes().all(is_run);
    is_replay.then_some(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_replay_of_a_replay_is_one_of_the_first_message() {
        let run = "20261121T101500-5f3a9c";
        assert_eq!(run.len(), LONGEST_RUN);
        for key in [
            "order-1",
            "",
            "a#replay-",
            "#replay-?",
            "ä#replay-#replay-!",
            "+new",
        ] {
            for has_new_id in [false, true] {
                let first = replayed(key, "first", has_new_id);
                assert_eq!(base_of(&first), Some(key));
                assert_eq!(replayed(&first, run, false), format!("{key}#replay-{run}"));
                let (from, to) = keys_of_replays(key);
                assert!((from..to).contains(&first));
            }
        }
    }

    #[test]
    fn a_replay_with_a_new_id_is_another_message() {
        assert_eq!(
            same_message(&replayed("order-1", "r", false)),
            Some("order-1")
        );
        assert_eq!(same_message(&replayed("order-1", "r", true)), None);
        assert_eq!(same_message("order-1"), None);
    }
}
