//! A cache for results of expensive queries: the longer a query took, the longer its result is kept.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Results in the cache.
const MOST: usize = 16;
/// A result is kept for this long, or this many times the duration of its query, but at most `OLDEST`.
const YOUNG: Duration = Duration::from_secs(2);
const YOUNG_TIMES: u32 = 50;
const OLDEST: Duration = Duration::from_secs(60);

/// Cached results by filter.
#[derive(Debug)]
pub(crate) struct Kept<T>(Mutex<Answers<T>>);

#[derive(Debug)]
struct Answers<T> {
    all: Vec<Answer<T>>,
    /// When the cache was last cleared: results of earlier queries are not kept.
    changed: Option<Instant>,
}

#[derive(Debug)]
struct Answer<T> {
    asked: String,
    value: T,
    until: Instant,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(Mutex::new(Answers {
            all: Vec::new(),
            changed: None,
        }))
    }
}

impl<T: Clone> Kept<T> {
    fn lock(&self) -> MutexGuard<'_, Answers<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cached result, or runs the query. Several threads may run it at the same time.
    pub(crate) fn get<E>(&self, asked: &str, look: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let began = Instant::now();
        let mut answers = self.lock();
        answers.all.retain(|answer| answer.until > began);
        if let Some(answer) = answers.all.iter().find(|answer| answer.asked == asked) {
            return Ok(answer.value.clone());
        }
        drop(answers);
        let value = look()?;
        let young = YOUNG.max(began.elapsed() * YOUNG_TIMES).min(OLDEST);
        let mut answers = self.lock();
        if answers.changed.is_some_and(|changed| began <= changed) {
            return Ok(value);
        }
        if answers.all.len() >= MOST {
            answers.all.remove(0);
        }
        answers.all.push(Answer {
            asked: asked.to_owned(),
            value: value.clone(),
            until: Instant::now() + young,
        });
        Ok(value)
    }

    pub(crate) fn forget(&self) {
        let mut answers = self.lock();
        answers.all.clear();
        answers.changed = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn an_answer_is_kept_until_it_is_forgotten_and_errors_are_not() {
        let kept = Kept::default();
        let asked = "?topic=a";
        assert_eq!(kept.get(asked, || Err::<i32, _>("away")), Err("away"));
        assert_eq!(kept.get(asked, || Ok::<_, Infallible>(1)), Ok(1));
        assert_eq!(kept.get(asked, || Ok::<_, Infallible>(2)), Ok(1));
        kept.forget();
        assert_eq!(kept.get(asked, || Ok::<_, Infallible>(3)), Ok(3));
    }

    #[test]
    fn an_answer_from_before_a_change_is_not_kept() {
        let kept = Kept::default();
        let asked = "?topic=a";
        let before = kept.get(asked, || {
            kept.forget();
            Ok::<_, Infallible>(1)
        });
        assert_eq!(before, Ok(1));
        assert_eq!(kept.get(asked, || Ok::<_, Infallible>(2)), Ok(2));
    }

    #[test]
    fn few_are_kept() {
        let kept = Kept::default();
        for n in 0..100 {
            let asked = &n.to_string();
            assert_eq!(kept.get(asked, || Ok::<_, Infallible>(n)), Ok(n));
        }
        assert_eq!(kept.lock().all.len(), MOST);
    }
}
