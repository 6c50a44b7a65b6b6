//! How people and programs choose messages: the options of commands, the fields of forms, the parameters of requests.

use std::time::{Duration, SystemTime};

use super::sql::selection::Selection;
use crate::config::text::parse_duration;
use crate::schema::instant::parse_time;
use crate::status::{ReasonCode, Status};

macro_rules! chosen {
    ($($(#[$about:meta])* $name:ident,)+) => {
        /// The conditions as they were written. A list shows what they choose, and an act changes it.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "commands", derive(clap::Args))]
        pub struct Chosen {
            $($(#[$about])* pub(crate) $name: Option<String>,)+
        }

        impl Chosen {
            /// The names of the conditions, in forms and requests. Commands have options of these names.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),+];

            /// The conditions that `get` has by their names. Empty ones are not given.
            pub fn of<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Self {
                let given = |name: &str| {
                    let text = get(name).map(str::trim).filter(|text| !text.is_empty());
                    text.map(str::to_owned)
                };
                Self { $($name: given(stringify!($name)),)+ }
            }

            /// Whether there is no condition.
            pub fn is_empty(&self) -> bool {
                [$(&self.$name),+].into_iter().all(Option::is_none)
            }
        }
    };
}

chosen! {
    /// Only this topic, or topics of this pattern: order.*
    #[cfg_attr(feature = "commands", arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new()))]
    topic,
    /// Only this destination; of waiting messages, those that name it and those that a route sends there
    #[cfg_attr(feature = "commands", arg(long, value_name = "NAME"))]
    destination,
    /// Only this tenant (a UUID)
    #[cfg_attr(feature = "commands", arg(long, value_name = "ID"))]
    tenant,
    /// Only this ordering key
    #[cfg_attr(feature = "commands", arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new()))]
    key,
    /// Only this reason, such as SERVER_ERROR: of the last failure, or of the dead letter
    #[cfg_attr(feature = "commands", arg(long))]
    reason,
    /// Only this state: pending, sending or retrying; of settled messages, delivered, no_subscriber or dead
    #[cfg_attr(feature = "commands", arg(long, alias = "state"))]
    status,
    /// Only messages enqueued, dead-lettered or settled since this time: 2026-11-21T10:00:00Z, or 2h for two hours ago
    #[cfg_attr(feature = "commands", arg(long, value_name = "TIME"))]
    since,
    /// Only messages enqueued, dead-lettered or settled before this time
    #[cfg_attr(feature = "commands", arg(long, value_name = "TIME"))]
    until,
}

/// A condition that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongChoice {
    /// The name of the condition.
    pub field: &'static str,
    /// What is wrong.
    pub why: String,
}

impl WrongChoice {
    pub(crate) fn new(field: &'static str, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { field, why }
    }
}

impl Chosen {
    /// The topic, or its pattern.
    pub fn topic(&self) -> Option<&str> {
        self.topic.as_deref()
    }

    /// Whether there is another condition than the destination.
    pub(crate) fn has_more_than_destination(&self) -> bool {
        let rest = Self {
            destination: None,
            ..self.clone()
        };
        !rest.is_empty()
    }

    /// The destination.
    pub fn destination(&self) -> Option<&str> {
        self.destination.as_deref()
    }

    /// Whether a time is given since when.
    pub fn has_begin(&self) -> bool {
        self.since.is_some()
    }

    /// Options with absolute times for times given as durations, which would choose other messages later.
    pub fn fixed_times(&self, selection: &Selection) -> String {
        let fixed = |option: &str, given: &Option<String>, time: Option<SystemTime>| {
            let is_ago = |text: &str| humantime::parse_duration(text).is_ok();
            let time = time.filter(|_| given.as_deref().is_some_and(is_ago));
            time.map_or(String::new(), |time| {
                format!(" {option} {}", humantime::format_rfc3339_micros(time))
            })
        };
        fixed("--since", &self.since, selection.since)
            + &fixed("--until", &self.until, selection.until)
    }

    /// The selection, of messages that wait.
    ///
    /// # Errors
    /// The same as of [`selection`](Self::selection), and a state that no waiting message has.
    pub fn of_waiting(&self) -> Result<Selection, WrongChoice> {
        let waits = |word: &String| word.parse().is_ok_and(|status: Status| !status.is_final());
        match self.status.as_ref().filter(|word| !waits(word)) {
            None => self.selection(),
            Some(word) => Err(WrongChoice::new(
                "status",
                format!(
                    "{word:?} is not pending, sending or retrying, the states of waiting messages; for dead letters, see `dead list`"
                ),
            )),
        }
    }

    /// The selection.
    ///
    /// # Errors
    /// A [`WrongChoice`]: a tenant that is no UUID, an unknown reason or state, no time, or an end before its begin.
    pub fn selection(&self) -> Result<Selection, WrongChoice> {
        let tenant = read("tenant", &self.tenant, |text| {
            text.parse().map_err(|_| format!("{text:?} is not a UUID"))
        })?;
        let (since, until) = (
            read("since", &self.since, time)?,
            read("until", &self.until, time)?,
        );
        if since
            .zip(until)
            .is_some_and(|(since, until)| since >= until)
        {
            return Err(WrongChoice::new("until", "must be after since"));
        }
        Ok(Selection::default()
            .topic(self.topic.clone())
            .destination(self.destination.clone())
            .tenant_id(tenant)
            .ordering_key(self.key.clone())
            .reason(read("reason", &self.reason, reason)?)
            .status(read("status", &self.status, status)?)
            .since(since)
            .until(until))
    }
}

fn read<T>(
    field: &'static str,
    given: &Option<String>,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, WrongChoice> {
    let read = given.as_deref().map(read).transpose();
    read.map_err(|why| WrongChoice { field, why })
}

fn reason(word: &str) -> Result<ReasonCode, String> {
    word.to_uppercase().parse().map_err(|_| {
        let names: Vec<&str> = ReasonCode::ALL.iter().map(|code| code.as_str()).collect();
        format!(
            "{word:?} is not a reason: expected one of {}",
            names.join(", ")
        )
    })
}

fn status(word: &str) -> Result<Status, String> {
    word.parse().map_err(|_| {
        format!("{word:?} is not a state: expected pending, sending, retrying, delivered, no_subscriber or dead")
    })
}

/// Parses a time as a person or a field of a browser writes it, in UTC if it names no zone, or a duration before now.
///
/// # Errors
/// The reason, which shows both forms.
pub fn time(text: &str) -> Result<SystemTime, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        // A duration longer than the era selects everything.
        let time = SystemTime::now().checked_sub(ago);
        return Ok(time.map_or(SystemTime::UNIX_EPOCH, |time| {
            time.max(SystemTime::UNIX_EPOCH)
        }));
    }
    parse_time(text).ok_or_else(|| {
        format!("{text:?} is not a time: write 2026-11-21T10:00:00Z (UTC), or 2h for two hours ago")
    })
}

/// Parses a duration such as `2h`, of this field.
pub(crate) fn duration(field: &'static str, text: &str) -> Result<Duration, WrongChoice> {
    parse_duration(field, text).map_err(|error| WrongChoice::new(field, error.reason()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_and_browsers_write_them() {
        let noon = humantime::parse_rfc3339("2026-01-31T12:00:00Z").expect("a time");
        for text in [
            "2026-01-31T12:00",
            "2026-01-31T12:00:00",
            "2026-01-31 12:00:00Z",
            "2026-01-31T14:00:00+02:00",
            "2026-01-31T04:30-0730",
        ] {
            assert_eq!(time(text), Ok(noon), "{text}");
        }
        assert_eq!(
            time("2026-01-31"),
            Ok(noon - Duration::from_secs(12 * 3600))
        );
        let ago = time("2h").expect("a time").elapsed();
        let hours = ago.expect("it is past").as_secs();
        assert!((7200..7260).contains(&hours), "{hours}");
        assert_eq!(time("99999d"), Ok(SystemTime::UNIX_EPOCH));
        for bad in ["yesterday", "2026", "<b>", "31.1.2026", "12:00"] {
            assert!(time(bad).is_err(), "{bad}: {:?}", time(bad));
        }
    }

    #[test]
    fn a_wrong_condition_is_named() {
        for (field, value) in [
            ("tenant", "acme"),
            ("reason", "SOMEHOW"),
            ("status", "lost"),
            ("since", "yesterday"),
            ("until", "tomorrow"),
        ] {
            let chosen = Chosen::of(|name| (name == field).then_some(value));
            let wrong = chosen.selection().expect_err(value);
            assert_eq!(wrong.field, field);
            assert!(wrong.why.contains(value), "{}", wrong.why);
        }
        let turned = Chosen::of(|name| match name {
            "since" => Some("1h"),
            "until" => Some("2h"),
            _ => None,
        });
        assert_eq!(turned.selection().expect_err("turned").field, "until");
    }

    #[test]
    fn empty_fields_of_a_form_choose_nothing() {
        let chosen = Chosen::of(|_| Some(" "));
        assert!(chosen.is_empty());
        assert!(
            chosen
                .selection()
                .is_ok_and(|selection| selection.is_everything())
        );
    }
}
