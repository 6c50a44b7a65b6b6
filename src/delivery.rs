//! How messages are delivered to a destination: content modes, batches, rate limits, the circuit breaker, and what a dead
//! letter does to its key.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::config_error::ConfigError;
use crate::words::words;

/// The longest lease: for so long no other relay may take over from a crashed relay.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);
/// The longest timeout of a send.
pub(crate) const LONGEST_SEND: Duration = Duration::from_secs(300);
/// The end of a session ends a lease early, unless the lease is shorter than this: it could be unseen by chance.
pub(crate) const SHORTEST_SEEN: Duration = Duration::from_secs(12);

words! {
    setting:
    /// How a message becomes a request: the content modes of CloudEvents over HTTP.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    #[non_exhaustive]
    pub enum Mode {
        /// The payload is the body. Everything else is in headers.
        #[default]
        Binary = "binary",
        /// The body is one JSON document with everything. Choose this mode for signed requests: headers are not signed.
        Structured = "structured",
        /// The body is a JSON array of documents: one request for many messages.
        Batched = "batched",
    }
}

words! {
    setting:
    /// Whether later messages with the ordering key of a dead letter are sent or wait.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    #[non_exhaustive]
    pub enum OnDead {
        /// The relay sends the next message.
        #[default]
        Continue = "continue",
        /// Later messages wait until an operator requeues or discards the dead letter.
        Block = "block",
    }
}

/// The limits of a request in batched mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestBatch {
    /// The most messages in one request. Defaults to 50.
    pub size: usize,
    /// How long a request waits for more messages. Defaults to 5 ms.
    pub linger: Duration,
}

impl Default for RequestBatch {
    fn default() -> Self {
        Self {
            size: 50,
            linger: Duration::from_millis(5),
        }
    }
}

/// A rate limit as a token bucket: the average rate, and the burst after an idle time.
///
/// ```
/// use diesel_outbox::{Destination, config::Rate};
///
/// let mut mailer = Destination::new("mailer", "https://mail.example/send")?;
/// mailer.policy.rate = Some(Rate::per_second(25.0));
/// assert_eq!(mailer.policy.rate.map(|rate| rate.burst), Some(3));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// Each relay counts its own requests: two relays send twice as many.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Rate {
    /// Requests per second on average.
    pub per_second: f64,
    /// Requests at once after an idle time.
    pub burst: u32,
}

impl Rate {
    pub(crate) const BOUNDS: &str = "must be at least 1 in 24 h, and below 1000000/s";
    /// One request in 24 hours. With less, a relay would wait for longer than anybody watches it.
    const LEAST: f64 = 1.0 / 86_400.0;

    /// A limit of `per_second` requests per second. The burst is a tenth of that, and at least 1.
    ///
    /// # Panics
    /// When `per_second` is not a number from 1 in 24 hours (1/86,400) to below 1,000,000.
    pub fn per_second(per_second: f64) -> Self {
        Self::checked(per_second).expect("the rate is at least 1 in 24 h, and below 1000000/s")
    }

    /// The limit that an endpoint asks for: `text` as in its row. A number of requests that is too small counts as the
    /// least one, so no endpoint can ask for a wait that no clock can count.
    pub(crate) fn asked(text: &str) -> Result<Self, ConfigError> {
        let per_second = parsed(text)?;
        let least = (per_second > 0.0).then(|| per_second.max(Self::LEAST));
        let rate = least.and_then(Self::checked);
        rate.ok_or_else(|| ConfigError::new("rate", Self::BOUNDS))
    }

    /// The same limit, or `None` if `per_second` is not within [`BOUNDS`](Self::BOUNDS).
    pub(crate) fn checked(per_second: f64) -> Option<Self> {
        let tenth = (per_second / 10.0).ceil();
        (Self::LEAST..1e6).contains(&per_second).then_some(Self {
            per_second,
            // Only used if `per_second` is in range.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            burst: tenth as u32,
        })
    }
}

/// Parses `10/s`, `600/min`, `100/h`.
///
/// ```
/// use diesel_outbox::config::Rate;
///
/// let rate: Rate = "90/min".parse()?;
/// assert_eq!(rate.per_second, 1.5);
/// assert_eq!(rate.to_string(), "1.5/s");
/// assert_eq!("2/h".parse::<Rate>()?.to_string(), "2/h");
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
impl FromStr for Rate {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::checked(parsed(text)?).ok_or_else(|| ConfigError::new("rate", Self::BOUNDS))
    }
}

/// The requests per second, in bounds or not.
fn parsed(text: &str) -> Result<f64, ConfigError> {
    let wrong = || ConfigError::new("rate", "not a rate such as 10/s, 600/min or 100/h");
    let (count, time) = text.trim().split_once('/').ok_or_else(wrong)?;
    let seconds = match time.trim() {
        "s" => 1.0,
        "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let count: f64 = count.trim().parse().map_err(|_| wrong())?;
    Ok(count / seconds)
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A stored rate is read again as the same number.
        let is_exact = |(count, unit): &(f64, &str)| {
            *count >= 1.0 && Self::from_str(&format!("{count}/{unit}")).as_ref() == Ok(self)
        };
        let slow = [
            (self.per_second * 60.0, "min"),
            (self.per_second * 3600.0, "h"),
        ];
        let per_second = (self.per_second, "s");
        let (count, unit) = match self.per_second < 1.0 {
            true => slow.into_iter().find(is_exact).unwrap_or(per_second),
            false => per_second,
        };
        write!(f, "{count}/{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an endpoint asks for is cut to what a relay can count; what a person writes is refused.
    #[test]
    fn a_rate_has_bounds() {
        for (text, least) in [("1e-308/min", true), ("0.001/h", true), ("5e-324/s", true)] {
            let asked = Rate::asked(text).expect("a rate");
            assert_eq!(asked.per_second == Rate::LEAST, least, "{text}");
            let again = asked.to_string().parse::<Rate>();
            assert_eq!(again, Ok(asked), "{text}: it is stored as {asked}");
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        for text in [
            "0/s", "-1/s", "NaN/s", "inf/s", "1e6/s", "1e308/s", "-0/min",
        ] {
            assert!(Rate::asked(text).is_err(), "{text}");
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        assert_eq!(Rate::asked("120/min"), "2/s".parse());
    }
}

/// A circuit breaker (Michael Nygard, "Release It!"). When a destination fails too often, the relay stops sending for a
/// time, then tries a single message. The time doubles until a message is delivered.
///
/// Failures are: failed connections, failed name lookups, TLS errors, timeouts, 5xx, and all other errors that do not
/// concern the single message.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Breaker {
    /// The share of failed sends that opens the breaker. Defaults to 0.5.
    pub failure_ratio: f64,
    /// The fewest sends in the window that can open the breaker. Defaults to 50.
    pub min_sends: u32,
    /// The time for which sends count. Defaults to 30 s.
    pub window: Duration,
    /// How long the breaker is open the first time. Doubled each time in a row. Defaults to 1 s.
    pub open: Duration,
    /// The longest time that the breaker is open. Defaults to 5 min.
    pub open_cap: Duration,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            failure_ratio: 0.5,
            min_sends: 50,
            window: Duration::from_secs(30),
            open: Duration::from_secs(1),
            open_cap: Duration::from_secs(300),
        }
    }
}
