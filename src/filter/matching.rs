//! Whether filters match a message.

use std::borrow::Cow;
use std::cell::OnceCell;

use super::reading::{self, Object, Value};
use super::{
    BUDGET, BUDGET_OF_ALL, BUDGET_OF_EACH, BYTES_OF_A_STEP, Filter, Leaf, MAX_FILTER_BYTES,
    PatternField, Relation, Scalar, Test, Wants,
};

/// What a filter says of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FilterOutcome {
    /// The filter matches.
    Matches,
    /// The filter does not match.
    DoesNot,
    /// The filter does not match, because the answer takes more steps than it has: [`BUDGET`], or its part of [`BUDGET_OF_ALL`].
    TooMuch,
}

/// Evaluates filters for one message, one outcome for each filter. Reads the payload at most once.
///
/// `headers`: the stored headers as a JSON object. A filter that asks for fields of a text that is not JSON does not match.
// Why: docs/decisions.md#filters
pub(crate) fn evaluate(
    filters: &[&Filter],
    topic: &str,
    headers: Option<&str>,
    payload: &str,
) -> Vec<FilterOutcome> {
    let topic = Value::Scalar(Scalar::Text(Cow::Borrowed(topic.as_bytes())));
    let (read_headers, read_payload) = (OnceCell::new(), OnceCell::new());
    let headers = || {
        let read = || headers.map(|json| reading::headers(json, filters));
        read_headers.get_or_init(read).as_ref()
    };
    let payload = || read_payload.get_or_init(|| reading::payload(payload, filters));
    let matches = |filter: &Filter, budget: &mut Budget| -> Result<bool, Spent> {
        if let Some(leaf) = &filter.topic
            && !budget.leaf(leaf, Some(&topic))?
        {
            return Ok(false);
        }
        if !filter.headers.is_empty() && !budget.fields(&filter.headers, headers())? {
            return Ok(false);
        }
        Ok(filter.fields.is_empty() || budget.fields(&filter.fields, Some(payload()))?)
    };
    let ask = |filter: &Filter, most: u32| {
        let mut budget = Budget(most);
        let outcome = match matches(filter, &mut budget) {
            Ok(true) => FilterOutcome::Matches,
            Ok(false) => FilterOutcome::DoesNot,
            Err(Spent) => FilterOutcome::TooMuch,
        };
        (outcome, most - budget.0)
    };
    // Equal parts, so that no filter takes what another needs; then what is left, to those that need more.
    let share = share_of(BUDGET_OF_ALL, filters.len());
    let asked = filters.iter().map(|filter| ask(filter, share));
    let (mut outcomes, used): (Vec<_>, Vec<_>) = asked.unzip();
    let left = used.into_iter().fold(BUDGET_OF_ALL, u32::saturating_sub);
    let costly = outcomes
        .iter()
        .filter(|one| **one == FilterOutcome::TooMuch);
    let more = share_of(left, costly.count());
    if more > share {
        for (outcome, filter) in outcomes.iter_mut().zip(filters) {
            if *outcome == FilterOutcome::TooMuch {
                (*outcome, _) = ask(filter, more);
            }
        }
    }
    outcomes
}

fn share_of(steps: u32, count: usize) -> u32 {
    let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
    (steps / count).clamp(BUDGET_OF_EACH, BUDGET)
}

/// The steps that are left.
struct Budget(u32);

/// No steps are left.
struct Spent;

impl Budget {
    fn spend(&mut self, steps: u32) -> Result<(), Spent> {
        let left = self.0.checked_sub(steps);
        self.0 = left.unwrap_or(0);
        left.map(drop).ok_or(Spent)
    }

    /// Whether a value has fields that match.
    fn fields(
        &mut self,
        fields: &[PatternField],
        value: Option<&Value<'_>>,
    ) -> Result<bool, Spent> {
        match value {
            Some(Value::Object(object)) => self.object(fields, Some(object)),
            Some(Value::Array(items)) => match self.any_object(fields, items)? {
                Some(matches) => Ok(matches),
                None => self.object(fields, None),
            },
            Some(Value::Unread) => Ok(false),
            Some(Value::Scalar(_)) | None => self.object(fields, None),
        }
    }

    fn object(
        &mut self,
        fields: &[PatternField],
        object: Option<&Object<'_>>,
    ) -> Result<bool, Spent> {
        for field in fields {
            self.spend(1)?;
            let value = object.and_then(|object| object.find(field));
            let matches = match &field.wants {
                Wants::Fields(fields) => self.fields(fields, value)?,
                Wants::Leaf(leaf) => self.leaf(leaf, value)?,
            };
            if !matches {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether an object among these matches; `None`: there is none.
    fn any_object(
        &mut self,
        fields: &[PatternField],
        items: &[Value<'_>],
    ) -> Result<Option<bool>, Spent> {
        let mut any = None;
        for item in items {
            self.spend(1)?;
            let matches = match item {
                Value::Object(object) => Some(self.object(fields, Some(object))?),
                Value::Array(items) => self.any_object(fields, items)?,
                Value::Unread => Some(false),
                Value::Scalar(_) => None,
            };
            any = matches.or(any);
            if any == Some(true) {
                break;
            }
        }
        Ok(any)
    }

    fn leaf(&mut self, leaf: &Leaf, value: Option<&Value<'_>>) -> Result<bool, Spent> {
        match value {
            None => Ok(leaf.matches_missing),
            Some(_) if leaf.matches_present => Ok(true),
            Some(value) => self.any_test(&leaf.tests, value),
        }
    }

    fn any_test(&mut self, tests: &[Test], value: &Value<'_>) -> Result<bool, Spent> {
        match value {
            Value::Scalar(scalar) => {
                let steps = steps(scalar);
                for test in tests {
                    self.spend(steps.saturating_mul(test.values()))?;
                    if test.is_met_by(scalar) {
                        return Ok(true);
                    }
                }
            }
            Value::Array(items) if !tests.is_empty() => {
                for item in items {
                    self.spend(1)?;
                    if self.any_test(tests, item)? {
                        return Ok(true);
                    }
                }
            }
            Value::Array(_) | Value::Object(_) | Value::Unread => {}
        }
        Ok(false)
    }
}

/// The steps of a comparison with this value. No alternative is longer than a filter.
fn steps(scalar: &Scalar<'_>) -> u32 {
    let bytes = match scalar {
        Scalar::Text(text) => text.len(),
        Scalar::Number(number) => number.bytes(),
        Scalar::Boolean(_) | Scalar::Null => 0,
    };
    let steps = 1 + bytes.min(MAX_FILTER_BYTES) / BYTES_OF_A_STEP;
    u32::try_from(steps).unwrap_or(BUDGET)
}

impl Test {
    /// The values that are compared.
    fn values(&self) -> u32 {
        match self {
            Self::Not(values) => u32::try_from(values.len()).unwrap_or(u32::MAX),
            _ => 1,
        }
    }

    fn is_met_by(&self, scalar: &Scalar<'_>) -> bool {
        match (self, scalar) {
            (Self::Is(value), _) => value == scalar,
            (Self::Not(values), _) => !values.contains(scalar),
            (Self::Prefix(start), Scalar::Text(text)) => text.starts_with(start.as_bytes()),
            (Self::Suffix(end), Scalar::Text(text)) => text.ends_with(end.as_bytes()),
            (Self::IgnoreCase(lower), Scalar::Text(text)) => is_in_lower_case(lower, text),
            (Self::NotPrefix(start), Scalar::Text(text)) => !text.starts_with(start.as_bytes()),
            (Self::NotPrefix(_), _) => true,
            (Self::Numeric(bounds), Scalar::Number(number)) => bounds
                .iter()
                .all(|(relation, bound)| relation.holds(number, bound)),
            _ => false,
        }
    }
}

/// Whether this is the text in lower case.
fn is_in_lower_case(lower: &str, text: &[u8]) -> bool {
    // A character has at most four bytes, and in lower case at least one.
    if text.len() > 4 * lower.len() {
        return false;
    }
    let same = |text: &str| text.chars().flat_map(char::to_lowercase).eq(lower.chars());
    str::from_utf8(text).is_ok_and(same)
}

impl Relation {
    fn holds<T: Ord>(self, one: &T, other: &T) -> bool {
        match self {
            Self::Equal => one == other,
            Self::Less => one < other,
            Self::AtMost => one <= other,
            Self::More => one > other,
            Self::AtLeast => one >= other,
        }
    }
}
