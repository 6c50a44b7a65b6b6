//! What 4xx responses mean.

use std::collections::BTreeMap;

use crate::config_error::ConfigError;
use crate::words::words;

words! {
    setting:
    /// What a 4xx response means for a message.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Class {
        /// The relay retries the message until no attempts are left.
        Retry = "retry",
        /// The message is dead-lettered at once.
        Dead = "dead",
        /// The message waits, and the destination is paused until it is resumed. A new URL or enabling ends the pause of an
        /// endpoint, too.
        Pause = "pause",
    }
}

/// What each 4xx status means. By default 400, 413, 415 and 422 dead-letter the message, 410 pauses the
/// destination, and all others are retried.
///
/// ```
/// use diesel_outbox::{Destination, config::Class};
///
/// let mut billing = Destination::new("billing", "https://billing.example/events")?;
/// assert_eq!(billing.policy.classes.of(404), Class::Retry);
/// // This receiver returns 404 for a customer who has left.
/// billing.policy.classes.set(404, Class::Dead)?;
/// // The token has expired: an operator must renew it.
/// billing.policy.classes.set(401, Class::Pause)?;
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

    /// The statuses whose class is not the default.
    pub(super) fn changed(&self) -> impl Iterator<Item = (u16, Class)> {
        let default = Self::default();
        let all = self
            .by_status
            .iter()
            .map(|(status, class)| (*status, *class));
        all.filter(move |(status, class)| default.of(*status) != *class)
    }

    /// Sets the class of a status.
    ///
    /// # Errors
    /// A [`ConfigError`] when the status is not from 400 to 499.
    pub fn set(&mut self, status: u16, class: Class) -> Result<(), ConfigError> {
        if !(400..=499).contains(&status) {
            return Err(ConfigError::new(
                "classes",
                format!(
                    "{status} is not a status from 400 to 499: other statuses have a fixed meaning"
                ),
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
    fn only_4xx_responses_can_be_classed() {
        let mut classes = Classes::default();
        assert_eq!(classes.of(400), Class::Dead);
        assert_eq!(classes.of(404), Class::Retry);
        assert_eq!(classes.of(410), Class::Pause);
        classes.set(404, Class::Dead).expect("a 4xx");
        assert_eq!(classes.of(404), Class::Dead);
        assert!(classes.set(500, Class::Dead).is_err());
    }
}
