//! Login sessions. They live in memory: a restart ends them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a session lasts.
pub(super) const LONGEST: Duration = Duration::from_secs(12 * 3600);
/// Sessions at the same time; another login ends the oldest.
const MOST: usize = 100;

#[derive(Default)]
pub(super) struct Sessions {
    of_ids: Mutex<HashMap<String, Session>>,
}

struct Session {
    who: String,
    began: Instant,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Session>> {
        self.of_ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, id: String, who: String, now: Instant) {
        let mut sessions = self.lock();
        sessions.retain(|_, session| now.saturating_duration_since(session.began) < LONGEST);
        if sessions.len() >= MOST {
            let oldest = sessions.iter().min_by_key(|(_, session)| session.began);
            if let Some(oldest) = oldest.map(|(id, _)| id.clone()) {
                sessions.remove(&oldest);
            }
        }
        sessions.insert(id, Session { who, began: now });
    }

    pub(super) fn name_of(&self, id: &str, now: Instant) -> Option<String> {
        let sessions = self.lock();
        let session = sessions.get(id)?;
        let is_good = now.saturating_duration_since(session.began) < LONGEST;
        is_good.then(|| session.who.clone())
    }

    pub(super) fn end(&self, id: &str) {
        self.lock().remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_ends_by_itself_and_the_oldest_gives_way() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        for number in 0..=MOST {
            let began = now + Duration::from_secs(number as u64);
            sessions.begin(number.to_string(), "ann".to_owned(), began);
        }
        assert_eq!(sessions.name_of("0", now), None);
        assert_eq!(sessions.name_of("1", now).as_deref(), Some("ann"));
        assert_eq!(
            sessions.name_of("1", now + Duration::from_secs(1) + LONGEST),
            None
        );
        sessions.end("2");
        assert_eq!(sessions.name_of("2", now), None);
        assert_eq!(sessions.name_of("", now), None);
    }
}
