//! When the threads of a relay, or of a pool, may connect after a connection has failed: one thread at a time, and less and
//! less often. A password that has changed, or a server that is down, is tried by the relay as a whole.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::error::DatabaseError;
use crate::lock::lock;

/// The first wait after a failure, and the wait for the thread that tries.
const SHORTEST_WAIT: Duration = Duration::from_millis(50);
/// A server that restarts or fails over is used again this soon.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// Nobody but a person ends this.
const LONGEST_WAIT_FOR_A_LOGIN: Duration = Duration::from_secs(10);
/// What PostgreSQL says where it refuses a login. libpq gives no code for it. In another language the shorter wait holds.
const REFUSED: [&str; 4] = [
    "authentication failed",
    "pg_hba.conf",
    "does not exist",
    "not permitted to log in",
];
/// The wait is this part of the time since the first failure. So a relay is back soon after a short outage.
const PART: u32 = 5;

#[derive(Debug, Default)]
pub(crate) struct Logins(Mutex<Option<FailingLogins>>);

#[derive(Debug)]
struct FailingLogins {
    since: Instant,
    next: Instant,
    is_tried: bool,
    error: String,
}

impl FailingLogins {
    fn wait(&self, now: Instant) -> Duration {
        match self.is_tried {
            true => SHORTEST_WAIT,
            false => self.next.saturating_duration_since(now),
        }
    }
}

/// A try to connect. Its end must be reported.
#[must_use]
pub(crate) struct LoginAttempt<'a>(&'a Logins);

impl Logins {
    /// The last error, if it is too early for the next try.
    pub(crate) fn refusal(&self, now: Instant) -> Option<DatabaseError> {
        let failing = lock(&self.0);
        let failing = failing.as_ref().filter(|one| !one.wait(now).is_zero())?;
        Some(DatabaseError::Connect(failing.error.clone()))
    }

    /// Begins a try.
    ///
    /// # Errors
    /// The last error, if it is too early.
    pub(crate) fn begin(&self, now: Instant) -> Result<LoginAttempt<'_>, DatabaseError> {
        if let Some(failing) = &mut *lock(&self.0) {
            if !failing.wait(now).is_zero() {
                return Err(DatabaseError::Connect(failing.error.clone()));
            }
            failing.is_tried = true;
        }
        Ok(LoginAttempt(self))
    }

    /// How long to wait for the next try. `None`: the last try has succeeded.
    pub(crate) fn wait(&self, now: Instant) -> Option<Duration> {
        Some(lock(&self.0).as_ref()?.wait(now))
    }
}

impl LoginAttempt<'_> {
    /// Reports the end of the try.
    pub(crate) fn end<T>(self, result: &Result<T, DatabaseError>, now: Instant) {
        let mut state = lock(&self.0.0);
        let Err(error) = result else {
            *state = None;
            return;
        };
        let since = state.as_ref().map_or(now, |failing| failing.since);
        let error = match error {
            DatabaseError::Connect(error) => error.clone(),
            other => other.to_string(),
        };
        let wait = now.saturating_duration_since(since) / PART;
        *state = Some(FailingLogins {
            since,
            next: now + wait.clamp(SHORTEST_WAIT, longest(&error)),
            is_tried: false,
            error,
        });
    }
}

fn longest(error: &str) -> Duration {
    match REFUSED.iter().any(|words| error.contains(words)) {
        true => LONGEST_WAIT_FOR_A_LOGIN,
        false => LONGEST_WAIT,
    }
}

impl Drop for LoginAttempt<'_> {
    /// After a panic, others may try.
    fn drop(&mut self) {
        if let Some(failing) = &mut *lock(&self.0.0) {
            failing.is_tried = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> Result<(), DatabaseError> {
        let error = "FATAL:  password authentication failed for user \"shop\"";
        Err(DatabaseError::Connect(error.to_owned()))
    }

    /// R65: a server that was away for an hour is used within two seconds.
    #[test]
    fn a_server_that_is_away_is_tried_every_two_seconds_however_long_it_was() {
        let (logins, began) = (Logins::default(), Instant::now());
        let away = || Err::<(), _>(DatabaseError::Connect("Connection refused".to_owned()));
        let mut now = began;
        while now - began < Duration::from_secs(3600) {
            logins.begin(now).expect("it is time").end(&away(), now);
            let wait = logins.wait(now).expect("failing");
            assert!(wait <= Duration::from_secs(2), "{wait:?}");
            now += wait;
        }
    }

    #[test]
    fn while_logins_fail_one_thread_tries_at_a_time() {
        let (logins, now) = (Logins::default(), Instant::now());
        let (first, second) = (logins.begin(now), logins.begin(now));
        let (first, second) = (
            first.expect("the first"),
            second.expect("at the start, all"),
        );
        first.end(&refused(), now);
        second.end(&refused(), now);
        assert!(logins.refusal(now).is_some());
        let later = now + SHORTEST_WAIT;
        let attempt = logins.begin(later).expect("it is time");
        assert!(logins.begin(later).is_err());
        assert_eq!(logins.wait(later), Some(SHORTEST_WAIT));
        attempt.end(&Ok(()), later);
        assert_eq!(logins.wait(later), None);
        assert!(logins.begin(later).is_ok() && logins.begin(later).is_ok());
    }

    #[test]
    fn a_login_that_fails_for_an_hour_is_tried_less_than_400_times_and_works_soon_after_a_short_outage()
     {
        let (logins, began) = (Logins::default(), Instant::now());
        let mut now = began;
        let mut waits = Vec::new();
        while now - began < Duration::from_secs(3600) {
            logins.begin(now).expect("it is time").end(&refused(), now);
            let wait = logins.wait(now).expect("failing");
            waits.push((now - began, wait));
            now += wait;
        }
        assert!(waits.len() < 400, "{}", waits.len());
        for (lasted, wait) in waits {
            assert!(
                wait <= SHORTEST_WAIT.max(lasted / PART),
                "{lasted:?}: {wait:?}"
            );
        }
    }
}
