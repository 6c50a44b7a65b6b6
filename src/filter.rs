//! Filters of endpoints: which messages a destination gets, by payload, topic and headers.
//!
//! A filter is a pattern, as EventBridge has them. Fields nest as in the payload. A field has an array of alternatives,
//! of which one must match; all fields must match. `"$topic"` and `"$header"` at the top stand for the topic and for the
//! stored headers of the message:
//!
//! ```json
//! {"euro": [{"numeric": [">=", 100]}], "customer": {"country": ["DE", "AT"]}, "$header": {"x-shop": [{"exists": true}]}}
//! ```
//!
//! | alternative | matches |
//! |---|---|
//! | `"DE"`, `100`, `true`, `null` | this value; `100` is also `100.0` and `1e2` |
//! | `{"prefix": "a"}`, `{"suffix": "a"}` | a text that begins or ends with this text |
//! | `{"equals-ignore-case": "a"}` | a text with the same characters in lower case |
//! | `{"anything-but": "a"}`, `{"anything-but": ["a", 1]}` | another text, number, boolean or null |
//! | `{"anything-but": {"prefix": "a"}}` | a text, number, boolean or null, but no text that begins with this text |
//! | `{"numeric": [">=", 100, "<", 200]}` | a number in this range; one or two of `=`, `<`, `<=`, `>`, `>=` |
//! | `{"exists": true}`, `{"exists": false}` | the field is there, whatever its value; the field is not there |
//!
//! - **Arrays.** An alternative matches an array if it matches an element (`anything-but`, too). Fields match an array if
//!   they all match the same object in it. Arrays within arrays count as one array.
//! - **Missing.** Where a pattern has fields and the payload has no object (nothing, a text, a number, an array without
//!   objects), these fields are not there: only `{"exists": false}` matches. `null`, `[]` and `{}` are there.
//! - **Numbers** of a payload are exact decimals of any length; an exponent beyond ±1,000,000,000 counts as that. A
//!   pattern has whole numbers of 64 bits, and decimals of up to 15 digits (of 17 and more, those that
//!   an `f64` has no room for are lost before a filter is made).
//! - **Text** is compared by characters, after escapes. `\u0000` is a character like others. Half of a surrogate pair
//!   equals no character of a pattern.
//! - **A repeated field** counts as in PostgreSQL's `jsonb`: the last one. So does a repeated name in a filter.
//! - **Depth.** A named field in more than 64 objects and arrays does not match, whatever its pattern.
//! - **Headers** are those that are stored with the message. Their names are compared without case.
//!
//! A filter has at most 4 KiB as JSON, [`MAX_FILTER_DEPTH`] names above an alternative, and [`MAX_LEAVES`] alternatives.
//!
//! A relay reads a payload once for all filters of a message, and keeps only the fields that some filter names. What
//! stands elsewhere in a payload does not matter. The time is bounded. A field looked up, an element visited and a value
//! compared are a step; a comparison of a longer text is one more for each 16 bytes. For a message, a filter has 20,000
//! steps, and all filters have 500,000 together: in equal parts, of at least 200; what cheap filters leave is for the
//! others. A filter that needs more does not match.

mod decimal;
mod matching;
mod parsing;
mod reading;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use self::decimal::Decimal;
pub(crate) use self::matching::{FilterOutcome, evaluate};

/// The most bytes of a filter, as JSON without white space.
pub(crate) const MAX_FILTER_BYTES: usize = 4096;
/// The most names of fields above an alternative.
pub const MAX_FILTER_DEPTH: usize = 16;
/// The most alternatives of a filter. Each value of `anything-but` counts.
pub const MAX_LEAVES: usize = 100;
/// Fields of a payload in more objects and arrays than these do not match.
pub(crate) const MAX_PAYLOAD_DEPTH: usize = 64;
/// The most steps of one filter for one message.
pub(crate) const BUDGET: u32 = 20_000;
/// The most steps of all filters for one message.
pub(crate) const BUDGET_OF_ALL: u32 = 500_000;
/// The steps that a filter has, however many others there are.
pub(crate) const BUDGET_OF_EACH: u32 = 200;
/// So many bytes of a text are compared in a step.
pub(crate) const BYTES_OF_A_STEP: usize = 16;

/// A checked filter.
///
/// ```
/// use diesel_outbox::filter::Filter;
/// use serde_json::json;
///
/// let filter = Filter::new(&json!({"euro": [{"numeric": [">=", 100]}], "country": ["DE", "AT"]}));
/// assert!(filter.is_ok());
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Filter {
    topic: Option<Leaf>,
    headers: Vec<PatternField>,
    fields: Vec<PatternField>,
    /// The places of all fields of the payload that the filter names.
    places: Vec<u64>,
}

impl Filter {
    /// Checks a filter.
    ///
    /// # Errors
    /// [`FilterError`] names the place and what is wrong there.
    pub fn new(pattern: &Value) -> Result<Self, FilterError> {
        parsing::filter(pattern)
    }
}

/// From JSON, as a row has it.
impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(json: &str) -> Result<Self, FilterError> {
        let pattern = serde_json::from_str(json);
        Self::new(&pattern.map_err(|error| FilterError::new("", format!("not JSON: {error}")))?)
    }
}

/// Why a filter is refused, and where.
///
/// ```
/// use diesel_outbox::filter::Filter;
///
/// let refused = r#"{"customer": {"tier": [{"exists": 1}]}}"#.parse::<Filter>().map(drop);
/// let message = "customer.tier[0].exists: expected true or false";
/// assert_eq!(refused.map_err(|error| error.to_string()), Err(message.to_owned()));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FilterError {
    /// The place in the filter, such as `euro[0].numeric`. Empty: the whole filter.
    pub place: String,
    /// What is wrong there.
    pub problem: String,
}

impl FilterError {
    fn new(place: &str, problem: impl Into<String>) -> Self {
        let (place, problem) = (place.to_owned(), problem.into());
        Self { place, problem }
    }
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let colon = if self.place.is_empty() { "" } else { ": " };
        write!(f, "{}{colon}{}", self.place, self.problem)
    }
}

impl Error for FilterError {}

/// A field of a pattern, and what its value must be.
#[derive(Debug, Clone, PartialEq)]
struct PatternField {
    /// Of a header: in lower case.
    name: Box<[u8]>,
    /// See [`reading::place`].
    place: u64,
    wants: Wants,
}

#[derive(Debug, Clone, PartialEq)]
enum Wants {
    Fields(Vec<PatternField>),
    Leaf(Leaf),
}

/// Alternatives.
#[derive(Debug, Clone, Default, PartialEq)]
struct Leaf {
    /// `{"exists": false}` is one of them.
    matches_missing: bool,
    /// `{"exists": true}` is one of them.
    matches_present: bool,
    tests: Vec<Test>,
}

/// An alternative about a text, number, boolean or null.
#[derive(Debug, Clone, PartialEq)]
enum Test {
    Is(Scalar<'static>),
    Not(Vec<Scalar<'static>>),
    Prefix(String),
    NotPrefix(String),
    Suffix(String),
    /// In lower case.
    IgnoreCase(String),
    Numeric(Vec<(Relation, Decimal)>),
}

/// How a number of a payload must stand to a number of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    Equal,
    Less,
    AtMost,
    More,
    AtLeast,
}

/// A value that is neither an object nor an array.
#[derive(Debug, Clone, PartialEq)]
enum Scalar<'v> {
    /// UTF-8, but for halves of surrogate pairs.
    Text(Cow<'v, [u8]>),
    Number(Decimal),
    Boolean(bool),
    Null,
}
