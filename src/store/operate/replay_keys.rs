//! Idempotency keys of replays: `order-1#replay-20261121T101500-5f3a9c` is the key of a replay of `order-1`.

use sha2::{Digest, Sha256};

/// The text between the key of a message and the name of the run that replayed the message.
const MARK: &str = "#replay-";

/// The first text after all texts that begin with [`MARK`]: `.` follows `-`.
const AFTER_MARK: &str = "#replay.";

/// The longest key that is not cut. A key has at most 255 bytes; mark and run take 30.
const LONGEST_KEY: usize = 220;

/// The characters that are kept of a longer key. With the hash, they take at most 217 bytes, so a cut key is not cut
/// again.
const KEPT: usize = 38;

/// The most characters in the name of a run.
pub(crate) const LONGEST_RUN: usize = 22;

/// The key of a message in a replay. A replay of a replay gets the key of a replay of the first message.
pub(super) fn replayed(key: &str, run: &str) -> String {
    format!("{}{MARK}{run}", cut(base_of(key).unwrap_or(key)))
}

/// The range of the keys of a message's replays: from the first text, and before the second.
pub(in crate::store) fn keys_of_replays(key: &str) -> (String, String) {
    let key = cut(key);
    (format!("{key}{MARK}"), format!("{key}{AFTER_MARK}"))
}

/// The key at the beginning of a replay's key. `None`: this is not the key of a replay.
pub(in crate::store) fn base_of(key: &str) -> Option<&str> {
    let (base, run) = key.rsplit_once(MARK)?;
    let is_run = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_replay = (1..=LONGEST_RUN).contains(&run.len()) && run.bytes().all(is_run);
    is_replay.then_some(base)
}

/// The key, with room for mark and run after it. A long key is cut; its hash keeps it unique.
fn cut(key: &str) -> String {
    if key.len() <= LONGEST_KEY {
        return key.to_owned();
    }
    let kept: String = key.chars().take(KEPT).collect();
    format!("{kept}~{:x}", Sha256::digest(key))
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
        ] {
            let first = replayed(key, "first");
            assert_eq!(base_of(&first), Some(key));
            assert_eq!(replayed(&first, run), format!("{key}#replay-{run}"));
        }
    }

    #[test]
    fn a_long_key_has_replays_of_its_own_that_are_keys() {
        let run = "x".repeat(LONGEST_RUN);
        let long: Vec<String> = [('a', 221), ('b', 221), ('\u{10ffff}', 63)]
            .map(|(last, count)| {
                format!(
                    "{}{last}",
                    "\u{10ffff}".repeat(40) + &"a".repeat(count - 40)
                )
            })
            .to_vec();
        for key in &long {
            let replay = replayed(key, &run);
            assert!(replay.len() <= 255, "{replay}");
            assert_eq!(replayed(&replay, &run), replay);
            let (from, to) = keys_of_replays(key);
            let is_replay_of_it = |other: &&String| (&from..&to).contains(&&replayed(other, &run));
            assert_eq!(
                long.iter().filter(is_replay_of_it).collect::<Vec<_>>(),
                [key]
            );
        }
    }
}
