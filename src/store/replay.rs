//! Replays: what was delivered, as new messages.

/// What stands between the key of a message and the name of the run that has replayed it.
pub(super) const MARK: &str = "#replay-";

/// The first text behind all that begin with [`MARK`].
pub(super) fn after_mark() -> String {
    // '.' follows '-'.
    format!("{}.", MARK.trim_end_matches('-'))
}

/// The SQL of a key that has room for the mark and the name of a run behind it: a long one is cut, and
/// stays one of its own by its hash.
pub(super) fn cut_key(key: &str) -> String {
    format!(
        "CASE WHEN octet_length({key}) <= {LONGEST_KEY} THEN {key}
              ELSE left({key}, 40) || '~' || md5({key}) END"
    )
}

/// A key has 255 bytes at most; mark and run take 30.
const LONGEST_KEY: usize = 220;
