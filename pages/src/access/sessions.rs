//! Login sessions: cookies signed with a key that comes from the token. So every process with the same token accepts
//! them, and they survive a restart; another token ends them all.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a session lasts.
pub(super) const LONGEST: Duration = Duration::from_secs(12 * 3600);
/// Ended sessions that are remembered; one more forgets the one that would have lasted shortest.
const MOST: usize = 10_000;

/// What a cookie says: until when, in seconds since 1970, and the visitor's name. The nonce tells sessions apart.
pub(super) fn unsigned(until: u64, who: &str, nonce: &str) -> String {
    format!("{until}.{}.{nonce}", crate::key::hex(who.as_bytes()))
}

/// The visitor's name and the end of the session, in what a cookie says.
pub(super) fn read(unsigned: &str) -> Option<(String, u64)> {
    let mut parts = unsigned.split('.');
    let until = parts.next()?.parse().ok()?;
    let name = parts.next().filter(|name| name.len() % 2 == 0)?.as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let name: Option<Vec<u8>> = name.chunks(2).map(byte).collect();
    Some((String::from_utf8(name?).ok()?, until))
}

/// The sessions that were ended at this process before their time.
#[derive(Default)]
pub(super) struct Ended(Mutex<HashMap<String, u64>>);

impl Ended {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `until`: how long the session would have lasted.
    pub(super) fn add(&self, session: &str, until: u64, now: u64) {
        let mut ended = self.lock();
        ended.retain(|_, until| *until > now);
        if ended.len() >= MOST {
            let shortest = ended.iter().min_by_key(|(_, until)| **until);
            if let Some(shortest) = shortest.map(|(session, _)| session.clone()) {
                ended.remove(&shortest);
            }
        }
        ended.insert(session.to_owned(), until);
    }

    pub(super) fn has(&self, session: &str) -> bool {
        self.lock().contains_key(session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_says_who_and_until_when() {
        for who in ["ann", "", "Jörg <b>.", "a.b"] {
            let text = unsigned(7, who, "00ff");
            assert_eq!(read(&text), Some((who.to_owned(), 7)), "{text}");
        }
        for bad in ["", "7", "7.6", "x.61.00", "7.zz.00", "7.ff.00"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn ended_sessions_are_remembered_until_their_end() {
        let ended = Ended::default();
        for number in 0..=MOST {
            ended.add(&number.to_string(), 10 + number as u64, 0);
        }
        assert!(!ended.has("0") && ended.has("1"));
        ended.add("other", 100, 11);
        assert!(!ended.has("1") && ended.has("2"));
    }
}
