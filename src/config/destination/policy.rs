//! The delivery policy of a destination: limits, retries, and what responses mean.
//!
//! An option is written in this file: a field of [`DeliveryPolicy`], a row of [`PolicyOption::ALL`], and its range
//! in [`DeliveryPolicy::check`]. `outbox.toml`, the table `outbox_endpoint`, the commands and the pages read the rows.
//! An option that makes sense for handlers in the process has a setter of `Handlers`, too.

use std::str::FromStr;
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use self::OptionOf::{Configured, Endpoint};
use super::{Breaker, Class, Classes, Mode, OnDead, Rate, Wrong, count_within, long_enough, wrong};
use crate::backoff::Backoff;
use crate::config::section::Section;
use crate::config::text::{words, written};
use crate::config::values::{count, duration, number, parsed, wrong_type};
use crate::config_error::ConfigError;

/// The limits and the delivery policy of a destination: configured, or an endpoint.
///
/// A field that is `None` has its default: see [the settings](crate::guide::settings).
///
/// ```
/// use diesel_outbox::Destination;
/// use diesel_outbox::config::OnDead;
/// use diesel_outbox::endpoints::Endpoint;
///
/// let mut billing = Destination::new("billing", "https://billing.example/events")?;
/// billing.policy.max_attempts = Some(10);
/// billing.policy.on_dead = Some(OnDead::Block);
/// let mut hook = Endpoint::new("acme", "https://acme.example/hooks");
/// hook.policy = billing.policy.clone();
/// assert_eq!(hook.policy.max_attempts, Some(10));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DeliveryPolicy {
    /// The CloudEvents mode of requests. `None`: `OUTBOX_MODE`, for an endpoint
    /// `OUTBOX_ENDPOINT_MODE`.
    pub mode: Option<Mode>,
    /// The time limit of one send. `None`: `OUTBOX_SEND_TIMEOUT`, for an endpoint
    /// `OUTBOX_ENDPOINT_TIMEOUT`.
    pub timeout: Option<Duration>,
    /// The number of concurrent sends, 1 to 1024: sender threads. `None`: `OUTBOX_CONCURRENCY`. Endpoints
    /// share threads: 1 to 64 sends, 4 by default.
    pub concurrency: Option<usize>,
    /// The rate limit in requests per second. `None`: no limit. Each relay counts its own; the limit of an
    /// endpoint is for all relays together.
    pub rate: Option<Rate>,
    /// Failed attempts after which a message is dead-lettered, at least 1. `None`: `OUTBOX_MAX_ATTEMPTS`, for an
    /// endpoint `OUTBOX_ENDPOINT_MAX_ATTEMPTS`.
    pub max_attempts: Option<u32>,
    /// The delay between attempts. `None`: `OUTBOX_BACKOFF`, for an endpoint `OUTBOX_ENDPOINT_BACKOFF`.
    pub backoff: Option<Backoff>,
    /// Whether later messages with the ordering key of a dead letter are sent or wait. `None`: `OUTBOX_ON_DEAD`.
    pub on_dead: Option<OnDead>,
    /// How long after it became due a message expires: it is dead-lettered (`EXPIRED`). A requeued message becomes due
    /// again. `None`: only when the message itself says so.
    pub expires_after: Option<Duration>,
    /// How many due messages of an ordering key are claimed together, sent one after the other, and settled together,
    /// 1 to 500. With more than 1, a key is faster, and after a crash its messages may come again from the beginning of
    /// the run.
    pub key_run: usize,
    /// What 4xx responses mean for a message.
    pub classes: Classes,
    /// The longest wait that `Retry-After` may ask for. Defaults to one hour.
    pub retry_after_cap: Duration,
    /// The circuit breaker. `None`: no breaker.
    pub breaker: Option<Breaker>,
}

impl Default for DeliveryPolicy {
    fn default() -> Self {
        Self {
            mode: None,
            timeout: None,
            concurrency: None,
            rate: None,
            max_attempts: None,
            backoff: None,
            on_dead: None,
            expires_after: None,
            key_run: 1,
            classes: Classes::default(),
            retry_after_cap: Duration::from_secs(3600),
            breaker: Some(Breaker::default()),
        }
    }
}

/// An option of a [`DeliveryPolicy`]: name, default, and what it does.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PolicyOption {
    /// The name: a field of the policy, a key of `outbox.toml` and, for endpoints, a column or a key of
    /// the column `policy`.
    pub name: &'static str,
    /// The name of the value in `--help`.
    pub value_name: &'static str,
    /// What the option does, in one line.
    pub help: &'static str,
    /// The default of a configured destination: a value, or the setting that has it.
    pub default: &'static str,
    place: OptionOf,
    set: fn(&mut DeliveryPolicy, &str, Value) -> Result<(), ConfigError>,
    clear: fn(&mut DeliveryPolicy),
    value: fn(&DeliveryPolicy) -> Option<Value>,
}

/// Which destinations have an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OptionOf {
    /// Configured destinations only.
    Configured,
    /// Endpoints, too, with this default. They have the option in a column of its own, or in `policy`.
    Endpoint(&'static str, OptionColumn),
}

/// Where the table of endpoints has an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OptionColumn {
    Column,
    Policy,
}

/// A row of the table: an option whose field has its name.
macro_rules! option {
    ($name:ident, $value_name:literal, $default:literal, $place:expr, $read:expr, $help:literal) => {
        PolicyOption {
            name: stringify!($name),
            value_name: $value_name,
            help: $help,
            default: $default,
            place: $place,
            set: |policy, key, value| {
                policy.$name = $read(key, value)?.into();
                Ok(())
            },
            clear: |policy| policy.$name = DeliveryPolicy::default().$name,
            value: |policy| {
                let is_set = policy.$name != DeliveryPolicy::default().$name;
                is_set.then(|| policy.$name.as_value())
            },
        }
    };
}

impl DeliveryPolicy {
    /// Reads the options that a table has.
    pub(in crate::config) fn read(&mut self, section: &mut Section) -> Result<(), ConfigError> {
        for option in PolicyOption::ALL {
            section.take(option.name, |key, value| (option.set)(self, key, value))?;
        }
        Ok(())
    }

    /// Reads the column `policy` of an endpoint.
    pub(crate) fn read_column(&mut self, json: &str) -> Result<(), ConfigError> {
        // The parser's own error would show a part of the text.
        let not_json = |_| ConfigError::new("policy", "not a JSON object");
        let value: Value = serde_json::from_str(json).map_err(not_json)?;
        let known: Vec<&str> = of_column().map(|option| option.name).collect();
        self.read(&mut Section::new("policy".to_owned(), value, &known)?)
    }

    /// The column `policy` of an endpoint.
    pub(crate) fn column(&self) -> Option<String> {
        let set =
            of_column().filter_map(|option| Some((option.name.to_owned(), option.value(self)?)));
        let set: Map<String, Value> = set.collect();
        (!set.is_empty()).then(|| Value::Object(set).to_string())
    }

    /// Checks each value: code may have set any.
    pub(crate) fn check(&self) -> Result<(), Wrong> {
        count_within(
            "concurrency",
            self.concurrency.unwrap_or(1),
            super::MOST_SENDERS,
        )?;
        long_enough("timeout", self.timeout.unwrap_or(Duration::MAX))?;
        count_within("max_attempts", self.max_attempts.unwrap_or(1), super::MOST)?;
        long_enough("expires_after", self.expires_after.unwrap_or(Duration::MAX))?;
        count_within("key_run", self.key_run, super::LONGEST_RUN)?;
        if let Some(rate) = self.rate {
            if Rate::checked(rate.per_second).is_none() {
                return wrong("rate", Rate::BOUNDS);
            }
            count_within("burst", rate.burst, super::MOST)?;
        }
        if let Some(breaker) = self.breaker {
            if !(breaker.failure_ratio > 0.0 && breaker.failure_ratio <= 1.0) {
                return wrong("breaker.failure_ratio", "must be above 0 and at most 1");
            }
            count_within("breaker.min_sends", breaker.min_sends, super::MOST)?;
            long_enough("breaker.window", breaker.window)?;
            long_enough("breaker.open", breaker.open)?;
            if breaker.open > breaker.open_cap {
                let cap = humantime::format_duration(breaker.open_cap);
                let reason = format!("must not be longer than open_cap, which is {cap}");
                return Err(("breaker.open", reason));
            }
        }
        Ok(())
    }
}

/// The options in the column `policy`.
fn of_column() -> impl Iterator<Item = &'static PolicyOption> {
    PolicyOption::ALL
        .iter()
        .filter(|option| option.is_of_column())
}

impl PolicyOption {
    /// All options. A row is: field, value, default, default and place of endpoints, reader, help.
    #[rustfmt::skip]
    pub const ALL: &'static [Self] = &[
        option!(mode, "MODE", "OUTBOX_MODE", Endpoint("OUTBOX_ENDPOINT_MODE", OptionColumn::Column),
            parsed("expected binary, structured or batched", Mode::read),
            "CloudEvents mode of requests: binary, structured or batched"),
        option!(timeout, "DURATION", "OUTBOX_SEND_TIMEOUT", Endpoint("OUTBOX_ENDPOINT_TIMEOUT", OptionColumn::Column), duration,
            "Time limit of one send"),
        option!(concurrency, "COUNT", "OUTBOX_CONCURRENCY", Endpoint("4", OptionColumn::Column), count_or_text::<usize>,
            "Maximum number of concurrent sends per relay, 1 to 1024 (endpoints: 1 to 64)"),
        option!(rate, "RATE", "", Endpoint("", OptionColumn::Column), rate,
            "Rate limit such as 10/s, 600/min or 100/h; of an endpoint: for all relays together"),
        PolicyOption {
            name: "burst", value_name: "COUNT", default: "a tenth of rate, at least 1", place: Configured,
            help: "Requests sent at once after an idle time",
            set: |policy, key, value| {
                let of_rate = policy.rate.as_mut();
                let rate = of_rate.ok_or_else(|| ConfigError::new(key, "requires rate, which is not set"))?;
                rate.burst = count_or_text(key, value)?;
                Ok(())
            },
            clear: |policy| policy.rate = policy.rate.and_then(|rate| Rate::checked(rate.per_second)),
            value: |policy| {
                let rate = policy.rate.filter(|rate| Rate::checked(rate.per_second) != Some(*rate))?;
                Some(rate.burst.into())
            },
        },
        option!(max_attempts, "COUNT", "OUTBOX_MAX_ATTEMPTS", Endpoint("OUTBOX_ENDPOINT_MAX_ATTEMPTS", OptionColumn::Policy), count_or_text::<u32>,
            "Failed attempts after which a message is dead-lettered"),
        option!(backoff, "BACKOFF", "OUTBOX_BACKOFF", Endpoint("OUTBOX_ENDPOINT_BACKOFF", OptionColumn::Policy),
            parsed("expected exponential(base, cap) or a table 5s,10s,20s", Backoff::from_str),
            "Delay between attempts: exponential(base, cap), or a table 5s,10s,20s"),
        option!(on_dead, "WORD", "OUTBOX_ON_DEAD", Endpoint("OUTBOX_ON_DEAD", OptionColumn::Policy),
            parsed("expected continue or block", OnDead::read),
            "Whether later messages with the ordering key of a dead letter are sent or wait: continue or block"),
        option!(expires_after, "DURATION", "", Endpoint("", OptionColumn::Policy), duration,
            "How long after it became due a message expires (EXPIRED)"),
        option!(key_run, "COUNT", "1", Endpoint("1", OptionColumn::Policy), count_or_text::<usize>,
            "Messages of an ordering key that are claimed, sent in turn and settled together, 1 to 500"),
        option!(classes, "CLASSES", "400=dead 410=pause 413=dead 415=dead 422=dead",
            Endpoint("400=dead 410=pause 413=dead 415=dead 422=dead", OptionColumn::Policy), classes,
            "Meaning of 4xx responses, such as 404=dead 401=pause: retry, dead or pause"),
        option!(retry_after_cap, "DURATION", "1h", Configured, duration,
            "Longest wait that Retry-After may ask for"),
        option!(breaker, "TABLE", "a table of its own defaults", Configured, breaker,
            "Circuit breaker: false, or a table"),
    ];

    /// The option of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|option| option.name == name)
    }

    /// Whether the table of endpoints has the option in its column `policy`.
    pub(crate) fn is_of_column(&self) -> bool {
        self.stored() == Some(OptionColumn::Policy)
    }

    /// Gives a policy the value that another policy has.
    pub(crate) fn copy(
        &self,
        from: &DeliveryPolicy,
        to: &mut DeliveryPolicy,
    ) -> Result<(), ConfigError> {
        match self.value(from) {
            Some(value) => (self.set)(to, self.name, value),
            None => {
                (self.clear)(to);
                Ok(())
            }
        }
    }

    /// The options of endpoints.
    pub fn of_endpoints() -> impl Iterator<Item = &'static Self> {
        Self::ALL.iter().filter(|option| option.stored().is_some())
    }

    /// The default of an endpoint: a value, or the setting that has it. `None`: endpoints do
    /// not have the option.
    pub fn registered_default(&self) -> Option<&'static str> {
        match self.place {
            Configured => None,
            Endpoint(default, _) => Some(default),
        }
    }

    fn stored(&self) -> Option<OptionColumn> {
        match self.place {
            Configured => None,
            Endpoint(_, stored) => Some(stored),
        }
    }

    /// Sets the option to a value, as `outbox.toml` has it. Text is allowed for every option, as in `5` for a number.
    ///
    /// # Errors
    /// A [`ConfigError`] names the `key`, and never shows the value.
    pub fn set(
        &self,
        policy: &mut DeliveryPolicy,
        key: &str,
        value: impl Into<Value>,
    ) -> Result<(), ConfigError> {
        (self.set)(policy, key, value.into())
    }

    /// Sets the option to its default.
    pub fn clear(&self, policy: &mut DeliveryPolicy) {
        (self.clear)(policy);
    }

    /// The value, as `outbox.toml` has it. `None`: the default.
    pub fn value(&self, policy: &DeliveryPolicy) -> Option<Value> {
        (self.value)(policy)
    }

    /// The value as text, which [`set`](Self::set) reads again. `None`: the default.
    pub fn text(&self, policy: &DeliveryPolicy) -> Option<String> {
        self.value(policy).map(|value| shown(&value))
    }
}

/// `404=dead 410=pause` for a table.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(table) => {
            let pairs = table
                .iter()
                .map(|(key, value)| format!("{key}={}", shown(value)));
            pairs.collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}

impl Serialize for DeliveryPolicy {
    /// The options that are set, as `outbox.toml` has them.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let set = PolicyOption::ALL.iter();
        serializer.collect_map(set.filter_map(|option| Some((option.name, option.value(self)?))))
    }
}

/// A value as `outbox.toml` has it.
trait AsValue {
    fn as_value(&self) -> Value;
}

macro_rules! as_value {
    ($($type:ty),+: |$value:ident| $written:expr) => {
        $(impl AsValue for $type {
            fn as_value(&self) -> Value {
                let $value = self;
                $written.into()
            }
        })+
    };
}

as_value!(u32, usize: |count| *count);
as_value!(Duration: |time| written(*time));
as_value!(Mode, Rate, Backoff, OnDead: |word| word.to_string());
as_value!(Classes: |classes| {
    let changed = classes.changed().map(|(status, class)| (status.to_string(), class.to_string().into()));
    changed.collect::<Map<String, Value>>()
});
as_value!(Breaker: |breaker| serde_json::json!({
    "failure_ratio": breaker.failure_ratio,
    "min_sends": breaker.min_sends,
    "window": written(breaker.window),
    "open": written(breaker.open),
    "open_cap": written(breaker.open_cap),
}));

impl<T: AsValue> AsValue for Option<T> {
    fn as_value(&self) -> Value {
        self.as_ref().map_or(Value::Bool(false), AsValue::as_value)
    }
}

/// A whole number, also as text.
fn count_or_text<T: TryFrom<i64>>(key: &str, value: Value) -> Result<T, ConfigError> {
    let number = value
        .as_str()
        .and_then(|text| text.trim().parse::<i64>().ok());
    count(key, number.map_or(value, Value::from))
}

/// Requests per second, or text such as `600/min`.
fn rate(key: &str, value: Value) -> Result<Rate, ConfigError> {
    if let Value::String(text) = &value {
        let parsed = text.parse::<Rate>();
        return parsed.map_err(|error| ConfigError::new(key, error.reason()));
    }
    let rate = Rate::checked(number(key, value)?);
    rate.ok_or_else(|| ConfigError::new(key, Rate::BOUNDS))
}

/// `404 = "dead"`, or text such as `404=dead 401=pause`.
fn classes(key: &str, value: Value) -> Result<Classes, ConfigError> {
    let value = match value {
        Value::String(text) => {
            let pair = |pair: &str| {
                let (status, class) = pair.split_once('=')?;
                Some((status.to_owned(), class.into()))
            };
            let pairs = words(&text)
                .map(pair)
                .collect::<Option<Map<String, Value>>>();
            let pairs = pairs.filter(|pairs| !pairs.is_empty());
            let expected = "expected a table, or text such as 404=dead 401=pause";
            Value::Object(pairs.ok_or_else(|| ConfigError::new(key, expected))?)
        }
        other => other,
    };
    let mut classes = Classes::default();
    for (key, status, value) in Section::open(key.to_owned(), value)?.entries() {
        let class = parsed("expected retry, dead or pause", Class::read)(&key, value)?;
        let status = Some(status).filter(|status| status.len() == 3);
        let status = status.and_then(|status| status.parse().ok());
        let is_set = status.is_some_and(|status| classes.set(status, class).is_ok());
        if !is_set {
            let reason = "not a status from 400 to 499: other statuses have a fixed meaning";
            return Err(ConfigError::new(key, reason));
        }
    }
    Ok(classes)
}

const BREAKER_KEYS: &[&str] = &["failure_ratio", "min_sends", "window", "open", "open_cap"];

/// `false`, or a table with the limits of the breaker.
fn breaker(key: &str, value: Value) -> Result<Option<Breaker>, ConfigError> {
    let mut breaker = Breaker::default();
    match value {
        Value::Bool(false) => return Ok(None),
        Value::Bool(true) => return Ok(Some(breaker)),
        Value::Object(_) => {}
        other => return Err(wrong_type(key, &other, "false or a table")),
    }
    let mut section = Section::new(key.to_owned(), value, BREAKER_KEYS)?;
    section.set("failure_ratio", &mut breaker.failure_ratio, number)?;
    section.set("min_sends", &mut breaker.min_sends, count)?;
    section.set("window", &mut breaker.window, duration)?;
    section.set("open", &mut breaker.open, duration)?;
    section.set("open_cap", &mut breaker.open_cap, duration)?;
    Ok(Some(breaker))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A policy with another value than the default in each field. The pattern lists every field, so that a new option
    /// does not compile without a value here.
    fn full() -> DeliveryPolicy {
        let mut policy = DeliveryPolicy::default();
        let DeliveryPolicy {
            mode,
            timeout,
            concurrency,
            rate,
            max_attempts,
            backoff,
            on_dead,
            expires_after,
            key_run,
            classes,
            retry_after_cap,
            breaker,
        } = &mut policy;
        *mode = Some(Mode::Batched);
        *timeout = Some(Duration::from_millis(2_500));
        *concurrency = Some(2);
        *rate = Some(Rate {
            burst: 7,
            ..Rate::per_second(1.5)
        });
        *max_attempts = Some(4);
        *backoff = Some(Backoff::Table(vec![Duration::from_secs(5)]));
        *on_dead = Some(OnDead::Block);
        *expires_after = Some(Duration::from_secs(86_400));
        *key_run = 50;
        classes.set(404, Class::Dead).expect("a 4xx");
        classes.set(410, Class::Retry).expect("a 4xx");
        *retry_after_cap = Duration::from_secs(6);
        *breaker = None;
        policy
    }

    #[test]
    fn each_option_is_read_as_it_is_written() {
        let (full, mut read) = (full(), DeliveryPolicy::default());
        for option in PolicyOption::ALL {
            assert_eq!(option.value(&read), None, "{}", option.name);
            let value = option.value(&full).expect(option.name);
            option
                .set(&mut read, option.name, value)
                .expect(option.name);
        }
        assert_eq!(read, full);
        let json = serde_json::to_value(&full).expect("JSON");
        assert_eq!(json["rate"], "1.5/s");
        assert_eq!(
            json["classes"],
            serde_json::json!({ "404": "dead", "410": "retry" })
        );
        assert_eq!(
            json.as_object().map(Map::len),
            Some(PolicyOption::ALL.len())
        );
        for option in PolicyOption::ALL {
            option.clear(&mut read);
        }
        assert_eq!(read, DeliveryPolicy::default());
    }

    /// A default stands in the field and, as text, in the row.
    #[test]
    fn the_text_of_a_default_says_the_default() {
        for name in ["key_run", "classes", "retry_after_cap"] {
            let option = PolicyOption::named(name).expect(name);
            let mut policy = full();
            option.clear(&mut policy);
            let cleared = policy.clone();
            option.set(&mut policy, name, option.default).expect(name);
            assert_eq!(policy, cleared);
        }
        let concurrency = PolicyOption::named("concurrency").expect("an option");
        let of_endpoints = crate::config::Config::default().for_endpoints();
        assert_eq!(
            concurrency.registered_default(),
            Some(of_endpoints.concurrency.to_string().as_str())
        );
    }

    /// Flags have text only.
    #[test]
    fn each_option_of_endpoints_is_read_from_its_text() {
        let (full, mut read) = (full(), DeliveryPolicy::default());
        for option in PolicyOption::of_endpoints() {
            let text = option.text(&full).expect(option.name);
            option.set(&mut read, option.name, text).expect(option.name);
            assert_eq!(option.value(&read), option.value(&full));
        }
    }

    #[test]
    fn the_column_has_the_options_that_have_no_column_of_their_own() {
        let full = full();
        let column = full.column().expect("a column");
        assert_eq!(
            column,
            r#"{"backoff":"5s","classes":{"404":"dead","410":"retry"},"expires_after":"1day","key_run":50,"max_attempts":4,"on_dead":"block"}"#
        );
        let mut read = DeliveryPolicy::default();
        read.read_column(&column).expect("good");
        assert_eq!(read.column(), Some(column));
        assert_eq!(DeliveryPolicy::default().column(), None);
        for (column, key) in [
            ("[1", "policy"),
            ("5", "policy"),
            (r#"{"timeout":"5s"}"#, "policy.timeout"),
            (r#"{"max_attempt":1}"#, "policy.max_attempt"),
            (r#"{"key_run":"many"}"#, "policy.key_run"),
            (r#"{"max_attempts":null}"#, "policy.max_attempts"),
            (r#"{"classes":{"404":"whatever"}}"#, "policy.classes.404"),
        ] {
            let error = read.read_column(column).expect_err(column);
            assert_eq!(error.key(), key, "{error}");
            assert!(!error.to_string().contains("whatever"), "{error}");
        }
    }
}
