//! Checks a pattern and makes it a filter.

use serde_json::{Map, Number, Value};

use super::decimal::Decimal;
use super::reading::{TOP, TOP_OF_HEADERS, place};
use super::{
    Filter, FilterError, Leaf, MAX_FILTER_BYTES, MAX_FILTER_DEPTH, MAX_LEAVES, PatternField,
    Relation, Scalar, Test, Wants,
};

/// So many significant digits of a decimal an `f64` keeps.
const MOST_DIGITS: usize = 15;

type ParseResult<T> = Result<T, FilterError>;

fn wrong<T>(at: &str, problem: impl Into<String>) -> ParseResult<T> {
    Err(FilterError::new(at, problem))
}

pub(super) fn filter(pattern: &Value) -> ParseResult<Filter> {
    let (mut parsing, mut topic) = (Parsing::default(), None);
    let (mut headers, mut fields) = (Vec::new(), Vec::new());
    for (name, value) in members(pattern, "")? {
        match name.as_str() {
            "$topic" => topic = Some(parsing.leaf(value, name)?),
            "$header" => headers = parsing.headers(value, name)?,
            _ => fields.push(parsing.field((name, value), "", TOP, 1)?),
        }
    }
    // Not before: a checked pattern is not deep.
    if pattern.to_string().len() > MAX_FILTER_BYTES {
        return wrong("", format!("a filter has at most {MAX_FILTER_BYTES} bytes"));
    }
    let places = parsing.places;
    Ok(Filter {
        topic,
        headers,
        fields,
        places,
    })
}

/// What is counted and collected on the way.
#[derive(Default)]
struct Parsing {
    leaves: usize,
    places: Vec<u64>,
}

impl Parsing {
    fn headers(&mut self, value: &Value, at: &str) -> ParseResult<Vec<PatternField>> {
        let mut headers: Vec<PatternField> = Vec::new();
        for (name, value) in members(value, at)? {
            let at = below(at, name);
            let name: Box<[u8]> = name.to_ascii_lowercase().into_bytes().into();
            if headers.iter().any(|other| other.name == name) {
                return wrong(&at, "the header stands there twice");
            }
            let (place, wants) = (
                place(TOP_OF_HEADERS, &name),
                Wants::Leaf(self.leaf(value, &at)?),
            );
            headers.push(PatternField { name, place, wants });
        }
        Ok(headers)
    }

    /// `object`, `depth`: the place of the object, and the depth of its fields.
    fn field(
        &mut self,
        (name, value): (&String, &Value),
        at: &str,
        object: u64,
        depth: usize,
    ) -> ParseResult<PatternField> {
        let (at, place) = (below(at, name), place(object, name.as_bytes()));
        if depth > MAX_FILTER_DEPTH {
            return wrong(&at, format!("fields nest at most {MAX_FILTER_DEPTH} deep"));
        }
        self.places.push(place);
        let wants = if value.is_object() {
            let members = members(value, &at)?.iter();
            let fields = members.map(|one| self.field(one, &at, place, depth + 1));
            Wants::Fields(fields.collect::<ParseResult<_>>()?)
        } else {
            Wants::Leaf(self.leaf(value, &at)?)
        };
        let name = name.as_bytes().into();
        Ok(PatternField { name, place, wants })
    }

    fn leaf(&mut self, value: &Value, at: &str) -> ParseResult<Leaf> {
        let expected = "expected an array of alternatives, such as [\"a\", {\"prefix\": \"b\"}]";
        let mut leaf = Leaf::default();
        for (number, value) in items(value, at, expected)?.iter().enumerate() {
            let at = format!("{at}[{number}]");
            let operator = operator(value, &at)?;
            self.leaves += match operator {
                Some(("anything-but", Value::Array(values))) => values.len(),
                _ => 1,
            };
            if self.leaves > MAX_LEAVES {
                return wrong(
                    &at,
                    format!("a filter has at most {MAX_LEAVES} alternatives"),
                );
            }
            match operator {
                Some(("exists", Value::Bool(true))) => leaf.matches_present = true,
                Some(("exists", Value::Bool(false))) => leaf.matches_missing = true,
                Some((name, value)) => leaf.tests.push(test(name, value, &below(&at, name))?),
                None => leaf.tests.push(Test::Is(scalar(value, &at)?)),
            }
        }
        Ok(leaf)
    }
}

fn operator<'p>(value: &'p Value, at: &str) -> ParseResult<Option<(&'p str, &'p Value)>> {
    if !value.is_object() {
        return Ok(None);
    }
    let operators = members(value, at)?;
    match operators.iter().next() {
        Some((name, value)) if operators.len() == 1 => Ok(Some((name, value))),
        _ => wrong(at, "expected one operator"),
    }
}

fn test(operator: &str, value: &Value, at: &str) -> ParseResult<Test> {
    Ok(match operator {
        "prefix" => Test::Prefix(text(value, at)?),
        "suffix" => Test::Suffix(text(value, at)?),
        "equals-ignore-case" => {
            let text = text(value, at)?;
            Test::IgnoreCase(text.chars().flat_map(char::to_lowercase).collect())
        }
        "anything-but" => anything_but(value, at)?,
        "numeric" => Test::Numeric(numeric(value, at)?),
        "exists" => return wrong(at, "expected true or false"),
        _ => {
            return wrong(
                at,
                "unknown operator: expected prefix, suffix, equals-ignore-case, anything-but, numeric or exists",
            );
        }
    })
}

fn anything_but(value: &Value, at: &str) -> ParseResult<Test> {
    if let Some((name, value)) = operator(value, at)? {
        let at = below(at, name);
        return match name {
            "prefix" => Ok(Test::NotPrefix(text(value, &at)?)),
            _ => wrong(&at, "expected values or a prefix"),
        };
    }
    if !value.is_array() {
        return Ok(Test::Not(vec![scalar(value, at)?]));
    }
    let values = items(value, at, "expected values")?.iter().enumerate();
    let values = values.map(|(number, value)| scalar(value, &format!("{at}[{number}]")));
    Ok(Test::Not(values.collect::<ParseResult<_>>()?))
}

fn numeric(value: &Value, at: &str) -> ParseResult<Vec<(Relation, Decimal)>> {
    use Relation::{AtLeast, AtMost, Equal, Less, More};
    let expected = "expected one or two comparisons, such as [\">=\", 10, \"<\", 20]";
    let mut bounds = Vec::new();
    for pair in items(value, at, expected)?.chunks(2) {
        let (Some(relation), Some(Value::Number(bound))) = (pair[0].as_str(), pair.get(1)) else {
            return wrong(at, expected);
        };
        let relation = match relation {
            "=" => Equal,
            "<" => Less,
            "<=" => AtMost,
            ">" => More,
            ">=" => AtLeast,
            _ => return wrong(at, "expected =, <, <=, > or >= before a number"),
        };
        bounds.push((relation, decimal(bound, at)?));
    }
    match bounds.as_slice() {
        [_] => Ok(bounds),
        [(More | AtLeast, low), (Less | AtMost, high)]
        | [(Less | AtMost, high), (More | AtLeast, low)]
            if low < high =>
        {
            Ok(bounds)
        }
        [_, _] => wrong(at, "expected a lower bound, and an upper bound above it"),
        _ => wrong(at, expected),
    }
}

fn scalar(value: &Value, at: &str) -> ParseResult<Scalar<'static>> {
    Ok(match value {
        Value::String(text) => Scalar::Text(text.clone().into_bytes().into()),
        Value::Number(number) => Scalar::Number(decimal(number, at)?),
        Value::Bool(boolean) => Scalar::Boolean(*boolean),
        Value::Null => Scalar::Null,
        _ => return wrong(at, "expected a text, a number, true, false or null"),
    })
}

/// The number, unless it may have been rounded when the pattern was read: an `f64` keeps the digits that it was read
/// from, if they are few.
fn decimal(number: &Number, at: &str) -> ParseResult<Decimal> {
    let text = number.to_string();
    let is_whole = number.is_i64() || number.is_u64();
    if !is_whole && digits(&text) > MOST_DIGITS {
        return wrong(
            at,
            "write at most 15 digits, or a whole number of at most 64 bits",
        );
    }
    Ok(Decimal::read(&text))
}

/// The significant digits of a number.
fn digits(number: &str) -> usize {
    let before_exponent = number.split(['e', 'E']).next().unwrap_or_default();
    let digits: String = (before_exponent.chars())
        .filter(char::is_ascii_digit)
        .collect();
    digits.trim_matches('0').len()
}

fn text(value: &Value, at: &str) -> ParseResult<String> {
    let text = value.as_str().map(str::to_owned);
    text.map_or_else(|| wrong(at, "expected a text"), Ok)
}

/// The elements of an array that has some.
fn items<'p>(value: &'p Value, at: &str, expected: &str) -> ParseResult<&'p [Value]> {
    let items = value.as_array().filter(|items| !items.is_empty());
    items.map_or_else(|| wrong(at, expected), |items| Ok(items.as_slice()))
}

/// The members of an object that has some.
fn members<'p>(value: &'p Value, at: &str) -> ParseResult<&'p Map<String, Value>> {
    let members = value.as_object().filter(|members| !members.is_empty());
    members.map_or_else(|| wrong(at, "expected an object that is not empty"), Ok)
}

/// The place of a name below a place.
fn below(at: &str, name: &str) -> String {
    let dot = if at.is_empty() { "" } else { "." };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '$');
    if !name.is_empty() && name.chars().all(is_plain) {
        format!("{at}{dot}{name}")
    } else {
        format!("{at}{dot}{name:?}")
    }
}
