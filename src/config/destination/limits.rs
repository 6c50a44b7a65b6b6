//! How much a destination gets: batches, rates, and the circuit breaker.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::config::ConfigError;

/// The limits of a request in batched mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestBatch {
    /// Messages in one request, at most. Defaults to 50.
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

/// A token bucket: so many requests a second on average, and so many at once after a silence.
///
/// ```
/// use diesel_outbox::{Destination, config::Rate};
///
/// let mut mailer = Destination::new("mailer", "https://mail.example/send")?;
/// mailer.rate = Some(Rate::per_second(25.0));
/// assert_eq!(mailer.rate.map(|rate| rate.burst), Some(3));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
///
/// Counted by each relay for itself: two relays send twice as much.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Rate {
    /// Requests a second.
    pub per_second: f64,
    /// Requests at once after a silence.
    pub burst: u32,
}

impl Rate {
    pub(in crate::config) const BOUNDS: &str = "it has to be above 0 and below 1000000";

    /// So many requests a second, and a tenth of that, but at least one, at once.
    ///
    /// # Panics
    /// When `per_second` is not a number above zero and below a million.
    pub fn per_second(per_second: f64) -> Self {
        Self::checked(per_second).expect("a rate is above zero and below a million")
    }

    /// The same; `None`: `per_second` is not within [`BOUNDS`](Self::BOUNDS).
    pub(in crate::config) fn checked(per_second: f64) -> Option<Self> {
        let tenth = (per_second / 10.0).ceil();
        (per_second > 0.0 && per_second < 1e6).then_some(Self {
            per_second,
            // In range, or not used.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            burst: tenth as u32,
        })
    }
}

/// As it is written: `10/s`, `600/min`, `100/h`.
///
/// ```
/// use diesel_outbox::config::Rate;
///
/// let rate: Rate = "90/min".parse()?;
/// assert_eq!(rate.per_second, 1.5);
/// assert_eq!(rate.to_string(), "1.5/s");
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
impl FromStr for Rate {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong = |reason: &str| ConfigError::new("rate", reason);
        let form = "it is no rate: 10/s, 600/min and 100/h are some";
        let (count, time) = text.trim().split_once('/').ok_or_else(|| wrong(form))?;
        let seconds = match time.trim() {
            "s" => 1.0,
            "min" => 60.0,
            "h" => 3600.0,
            _ => return Err(wrong(form)),
        };
        let count: f64 = count.trim().parse().map_err(|_| wrong(form))?;
        Self::checked(count / seconds).ok_or_else(|| wrong(Self::BOUNDS))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", self.per_second)
    }
}

/// A circuit breaker: a destination that fails is left alone for a time, then tried with a single
/// message, and so on with growing times until one is delivered. (Michael Nygard, "Release It!".)
///
/// Failures are: no connection, no name, TLS, timeouts, 5xx and whatever else says nothing about
/// the single message.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Breaker {
    /// The share of failures that opens it. Defaults to 0.5.
    pub failure_ratio: f64,
    /// Sends in the window, without which nothing is decided. Defaults to 50.
    pub min_sends: u32,
    /// How far back sends count. Defaults to 30 s.
    pub window: Duration,
    /// How long it is open the first time. Doubled each time in a row. Defaults to 1 s.
    pub open: Duration,
    /// The longest time. Defaults to 5 min.
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
