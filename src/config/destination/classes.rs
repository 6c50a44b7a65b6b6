//! What answers of 4xx mean.

use std::collections::BTreeMap;

use crate::config::error::ConfigError;
use crate::config::text::by_word;

/// What an answer of the class 4xx means for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Class {
    /// It is tried again, until its attempts are used up.
    Retry,
    /// It is dead at once.
    Dead,
    /// It is kept, and the destination is paused until an operator resumes it.
    Pause,
}

by_word!(
    Class,
    "retry, dead or pause",
    Retry = "retry",
    Dead = "dead",
    Pause = "pause"
);

/// What each status of 4xx means. By default 400, 413, 415 and 422 are dead, 410 pauses, and the
/// others are tried again.
///
/// ```
/// use diesel_outbox::{Destination, config::Class};
///
/// let mut billing = Destination::new("billing", "https://billing.example/events")?;
/// assert_eq!(billing.classes.of(404), Class::Retry);
/// // There it means that the customer is gone.
/// billing.classes.set(404, Class::Dead)?;
/// // Its token has run out: somebody has to look.
/// billing.classes.set(401, Class::Pause)?;
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classes {
    by_status: BTreeMap<u16, Class>,
}

impl Default for Classes {
    fn default() -> Self {
        let dead = [400, 413, 415, 422].map(|status| (status, Class::Dead));
        let mut by_status = BTreeMap::from(dead);
        by_status.insert(410, Class::Pause);
        Self { by_status }
    }
}

impl Classes {
    /// The class of a status.
    pub fn of(&self, status: u16) -> Class {
        self.by_status.get(&status).copied().unwrap_or(Class::Retry)
    }

    /// Sets the class of a status.
    ///
    /// # Errors
    /// A [`ConfigError`] when it is none of 400 to 499.
    pub fn set(&mut self, status: u16, class: Class) -> Result<(), ConfigError> {
        if !(400..=499).contains(&status) {
            return Err(ConfigError::new(
                "classes",
                format!("{status} is not one of 400 to 499: only these can be chosen"),
            ));
        }
        self.by_status.insert(status, class);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_4xx_answers_can_be_classed() {
        let mut classes = Classes::default();
        assert_eq!(classes.of(400), Class::Dead);
        assert_eq!(classes.of(404), Class::Retry);
        assert_eq!(classes.of(410), Class::Pause);
        classes.set(404, Class::Dead).expect("a 4xx");
        assert_eq!(classes.of(404), Class::Dead);
        assert!(classes.set(500, Class::Dead).is_err());
    }
}
