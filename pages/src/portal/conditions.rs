//! The filter of an endpoint as conditions: rows of a form with a field, an operator and values. Knows no page and no
//! database.
//!
//! - A field nests by dots. Conditions on the same field are alternatives. Two bounds of a number on the same field are a
//!   range, and `is not` excludes all its values. Only `is missing` can stand beside `is not`: a customer would expect that an
//!   event must meet both, and as alternatives they would let nearly every event through.
//! - `5` is the number 5 and the text "5", so `is 5` becomes `["5", 5]`. If the filter has only one of them there, it
//!   keeps only that one. The same holds for `true`, `false` and `null`.
//! - Conditions show a filter only if they make the same filter again.

use diesel_outbox::filter::{Filter, MAX_FILTER_DEPTH, MAX_LEAVES};
use serde_json::{Map, Value, json};

use super::words::Words;

/// A word of any language.
pub(super) type Word = fn(&Words) -> &'static str;

/// The operators, as a form sends them, and as a customer reads them. Those that a pattern has, too, have its name.
pub(super) const OPERATORS: [(&str, Word); 11] = [
    ("is", |words| words.is),
    ("is-not", |words| words.is_not),
    ("prefix", |words| words.begins_with),
    ("suffix", |words| words.ends_with),
    ("equals-ignore-case", |words| words.is_in_any_case),
    (">=", |words| words.at_least),
    ("<=", |words| words.at_most),
    (">", |words| words.more_than),
    ("<", |words| words.less_than),
    ("exists", |words| words.exists),
    ("missing", |words| words.is_missing),
];

/// A row of the form, as it is typed.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Condition {
    pub(super) field: String,
    /// One of [`OPERATORS`].
    pub(super) operator: String,
    /// One a line.
    pub(super) values: String,
}

impl Condition {
    pub(super) fn is_empty(&self) -> bool {
        self.field.trim().is_empty() && self.values.trim().is_empty()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &str> {
        let lines = self.values.split(['\n', '\r']);
        lines.map(str::trim).filter(|value| !value.is_empty())
    }

    pub(super) fn operator(&self) -> Option<Word> {
        let mut all = OPERATORS.into_iter();
        all.find_map(|(name, word)| (name == self.operator).then_some(word))
    }

    /// Whether a form sends the condition back as it shows it.
    fn is_plain(&self) -> bool {
        let mut texts = self.values().chain([self.field.as_str()]);
        !texts.any(|text| text.contains(char::is_control))
    }

    /// Adds the condition to a pattern. `present`: the filter until now.
    fn add_to(
        &self,
        pattern: &mut Map<String, Value>,
        present: Option<&Value>,
    ) -> Result<(), Word> {
        let unnamed: Word = |words| words.name_a_field;
        let path: Vec<&str> = self.field.split('.').map(str::trim).collect();
        if path.iter().any(|name| name.is_empty()) || ["$topic", "$header"].contains(&path[0]) {
            return Err(unnamed);
        }
        // What nests deeper would not even be dropped safely.
        if path.len() > MAX_FILTER_DEPTH {
            return Err(|words| words.filter_too_large);
        }
        let (last, above) = path.split_last().ok_or(unnamed)?;
        let nested: Word = |words| words.field_has_fields;
        let mut fields = pattern;
        for name in above {
            let below = fields.entry(*name).or_insert_with(|| json!({}));
            fields = below.as_object_mut().ok_or(nested)?;
        }
        let alternatives = fields.entry(*last).or_insert_with(|| json!([]));
        let alternatives = alternatives.as_array_mut().ok_or(nested)?;
        let present =
            (path.iter()).try_fold(present.unwrap_or(&Value::Null), |at, name| at.get(name));
        self.add(
            alternatives,
            present.and_then(Value::as_array).map_or(&[], Vec::as_slice),
        )
    }

    /// Adds the condition to the alternatives of its field. `present`: those until now.
    fn add(&self, alternatives: &mut Vec<Value>, present: &[Value]) -> Result<(), Word> {
        let operator = self.operator.as_str();
        let takes_none = ["exists", "missing"].contains(&operator);
        let has_none = self.values().next().is_none();
        if self.operator().is_none() || takes_none != has_none {
            return Err(|words| words.values_needed);
        }
        if self.values().nth(MAX_LEAVES).is_some() {
            return Err(|words| words.filter_too_large);
        }
        match operator {
            "exists" | "missing" => alternatives.push(json!({ "exists": operator == "exists" })),
            "is" => alternatives.extend(self.values().flat_map(|value| readings(value, present))),
            "is-not" => {
                let present = present.iter().filter_map(excluded);
                let present: Vec<Value> = present.flat_map(listed).cloned().collect();
                let values = self.values().flat_map(|value| readings(value, &present));
                join(alternatives, "anything-but", values.collect());
            }
            ">=" | "<=" | ">" | "<" => {
                let mut numbers = self.values().map(literal);
                let (Some(Some(number @ Value::Number(_))), None) =
                    (numbers.next(), numbers.next())
                else {
                    return Err(|words| words.one_number);
                };
                join(alternatives, "numeric", vec![json!(operator), number]);
            }
            _ => alternatives.extend(self.values().map(|value| json!({ operator: value }))),
        }
        let is_missing = json!({ "exists": false });
        let goes_with_is_not = |other: &Value| excluded(other).is_some() || *other == is_missing;
        let has_is_not = alternatives.iter().filter_map(excluded).next().is_some();
        if has_is_not && !alternatives.iter().all(goes_with_is_not) {
            return Err(|words| words.is_not_alone);
        }
        Ok(())
    }
}

/// What an alternative of `is not` excludes.
fn excluded(alternative: &Value) -> Option<&Value> {
    alternative.get("anything-but")
}

/// The values of the alternative with this operator, of which there is one for all conditions of a field.
fn join(alternatives: &mut Vec<Value>, operator: &str, values: Vec<Value>) {
    let mut known = alternatives.iter_mut();
    match known.find_map(|alternative| alternative.get_mut(operator)?.as_array_mut()) {
        Some(known) => known.extend(values),
        None => alternatives.push(json!({ operator: values })),
    }
}

/// The number, boolean or null with this text, if a filter can have it.
fn literal(text: &str) -> Option<Value> {
    let value: Value = serde_json::from_str(text).ok()?;
    let is_literal = matches!(value, Value::Number(_) | Value::Bool(_) | Value::Null);
    (is_literal && Filter::new(&json!({ "field": [value] })).is_ok()).then_some(value)
}

/// What a typed value may be: those of `present`, or else a text and what reads like it.
fn readings(text: &str, present: &[Value]) -> Vec<Value> {
    let all = [Some(json!(text)), literal(text)];
    let all: Vec<Value> = all.into_iter().flatten().collect();
    let known = all.iter().filter(|reading| present.contains(reading));
    let known: Vec<Value> = known.cloned().collect();
    if known.is_empty() { all } else { known }
}

/// The values of `anything-but`.
fn listed(values: &Value) -> &[Value] {
    match values {
        Value::Array(values) => values,
        value => std::slice::from_ref(value),
    }
}

/// The filter of these conditions; `None`: there is no condition. `present`: the filter until now. The error is the
/// number of a condition, and what the customer must do.
pub(super) fn pattern(
    conditions: &[Condition],
    present: Option<&Value>,
) -> Result<Option<Value>, (usize, Word)> {
    let mut pattern = Map::new();
    for (number, condition) in conditions.iter().enumerate() {
        let added = condition.add_to(&mut pattern, present);
        let checked = added.and_then(|()| check(&pattern));
        checked.map_err(|why| (number, why))?;
    }
    Ok((!pattern.is_empty()).then_some(Value::Object(pattern)))
}

/// Checks a pattern after each condition, so that it is known which one is wrong.
fn check(pattern: &Map<String, Value>) -> Result<(), Word> {
    let checked = Filter::new(&Value::Object(pattern.clone()));
    checked.map(drop).map_err(|error| -> Word {
        if error.place.ends_with("].numeric") {
            |words| words.lower_and_upper
        } else {
            |words| words.filter_too_large
        }
    })
}

/// The conditions of a filter; `None`: conditions cannot show it.
pub(super) fn conditions(filter: &Value) -> Option<Vec<Condition>> {
    let mut rows = Vec::new();
    collect(filter, "", &mut rows);
    let again = pattern(&rows, Some(filter)).ok()??;
    let is_shown = rows.iter().all(Condition::is_plain) && sorted(&again) == sorted(filter);
    is_shown.then_some(rows)
}

/// Adds a row for each alternative that rows can express. Other alternatives become rows that do not make the same filter,
/// so [`conditions`] refuses them.
fn collect(pattern: &Value, above: &str, rows: &mut Vec<Condition>) {
    for (name, below) in pattern.as_object().into_iter().flatten() {
        let field = match above {
            "" => name.clone(),
            above => format!("{above}.{name}"),
        };
        let Some(alternatives) = below.as_array() else {
            collect(below, &field, rows);
            continue;
        };
        let first = rows.len();
        for (operator, value) in alternatives.iter().flat_map(written) {
            let shown = text(&value);
            let mut of_field = rows[first..].iter_mut();
            match of_field.find(|row| row.operator == operator) {
                Some(row) if row.values().any(|shown| stands_for(shown, &value)) => {}
                Some(row) => row.values = format!("{}\n{shown}", row.values),
                None => rows.push(Condition {
                    field: field.clone(),
                    operator: operator.to_owned(),
                    values: shown,
                }),
            }
        }
    }
}

fn text(value: &Value) -> String {
    let text = value.as_str().map(str::to_owned);
    text.unwrap_or_else(|| value.to_string())
}

/// Whether a value that is shown also stands for this one.
fn stands_for(shown: &str, value: &Value) -> bool {
    shown == text(value) || literal(shown).as_ref() == Some(value)
}

/// An alternative as operators and values.
fn written(alternative: &Value) -> Vec<(&str, Value)> {
    let operator = alternative
        .as_object()
        .and_then(|object| object.iter().next());
    match operator.map(|(name, value)| (name.as_str(), value)) {
        None => vec![("is", alternative.clone())],
        Some(("exists", Value::Bool(true))) => vec![("exists", json!(""))],
        Some(("exists", _)) => vec![("missing", json!(""))],
        Some(("anything-but", values)) => {
            let values = listed(values).iter().cloned();
            values.map(|value| ("is-not", value)).collect()
        }
        Some(("numeric", bounds)) => {
            let pairs = listed(bounds).chunks_exact(2);
            let bounds = pairs.filter_map(|pair| Some((pair[0].as_str()?, pair[1].clone())));
            bounds.collect()
        }
        Some((name, value)) => vec![(name, value.clone())],
    }
}

/// The same for patterns that differ only in the order and the repetition of values.
fn sorted(pattern: &Value) -> Value {
    match pattern {
        Value::Array(values) => {
            let mut values: Vec<Value> = values.iter().map(sorted).collect();
            values.sort_by_cached_key(Value::to_string);
            values.dedup();
            values.into()
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                let value = match name.as_str() {
                    "anything-but" if !value.is_object() => sorted(&json!(listed(value))),
                    _ => sorted(value),
                };
                (name.clone(), value)
            };
            fields.iter().map(field).collect()
        }
        value => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::Language;
    use super::*;

    fn row(field: &str, operator: &str, values: &str) -> Condition {
        let [field, operator, values] = [field, operator, values].map(str::to_owned);
        Condition {
            field,
            operator,
            values,
        }
    }

    fn made(rows: &[(&str, &str, &str)], present: Option<&Value>) -> Value {
        let rows: Vec<_> = rows.iter().map(|(a, b, c)| row(a, b, c)).collect();
        let made =
            pattern(&rows, present).map_err(|(at, why)| (at, why(Language::English.words())));
        made.expect("accepted").expect("a condition")
    }

    fn shown(filter: &Value) -> Option<Vec<(String, String, String)>> {
        let rows = conditions(filter)?.into_iter();
        let row = |row: Condition| (row.field, row.operator, row.values.replace('\n', "|"));
        Some(rows.map(row).collect())
    }

    #[test]
    fn each_operator_becomes_a_pattern_and_is_shown_again() {
        for (operator, values, alternatives) in [
            ("is", "DE\r\n AT ", json!(["DE", "AT"])),
            ("is", "5\ntrue\n05", json!(["5", 5, "true", true, "05"])),
            ("is-not", "DE", json!([{ "anything-but": ["DE"] }])),
            (
                "is-not",
                "DE\nnull",
                json!([{ "anything-but": ["DE", "null", null] }]),
            ),
            (
                "prefix",
                "a\n5",
                json!([{ "prefix": "a" }, { "prefix": "5" }]),
            ),
            ("suffix", "a b", json!([{ "suffix": "a b" }])),
            (
                "equals-ignore-case",
                "a",
                json!([{ "equals-ignore-case": "a" }]),
            ),
            (">=", "-1", json!([{ "numeric": [">=", -1] }])),
            ("<=", "9.5", json!([{ "numeric": ["<=", 9.5] }])),
            (">", "0", json!([{ "numeric": [">", 0] }])),
            (
                "<",
                "18446744073709551615",
                json!([{ "numeric": ["<", u64::MAX] }]),
            ),
            ("exists", "", json!([{ "exists": true }])),
            ("missing", "", json!([{ "exists": false }])),
        ] {
            let filter = made(&[("customer.tier", operator, values)], None);
            assert_eq!(filter, json!({ "customer": { "tier": alternatives } }));
            let lines: Vec<&str> = values.lines().map(str::trim).collect();
            let again = (
                "customer.tier".to_owned(),
                operator.to_owned(),
                lines.join("|"),
            );
            assert_eq!(shown(&filter), Some(vec![again]), "{filter}");
        }
    }

    #[test]
    fn conditions_on_a_field_are_alternatives_and_bounds_are_a_range() {
        let rows = [
            ("total", ">=", "100"),
            ("lines.kind", "is", "book"),
            ("total", "<", "200"),
            ("total", "missing", ""),
            ("lines.id", "is-not", "a"),
            ("lines.id", "is-not", "b"),
        ];
        let filter = json!({
            "lines": { "id": [{ "anything-but": ["a", "b"] }], "kind": ["book"] },
            "total": [{ "numeric": [">=", 100, "<", 200] }, { "exists": false }],
        });
        assert_eq!(made(&rows, None), filter);
        assert_eq!(shown(&filter).map(|rows| rows.len()), Some(5));
    }

    #[test]
    fn is_not_stands_beside_no_alternative_but_is_missing() {
        let words = Language::English.words();
        let is_not = ("total", "is-not", "150");
        let exists = |operator| operator == "exists" || operator == "missing";
        for (operator, _) in OPERATORS {
            let other = ("total", operator, if exists(operator) { "" } else { "100" });
            for (first, second) in [(is_not, other), (other, is_not)] {
                let rows = [first, ("state", operator, other.2), second];
                let rows = rows.map(|(field, operator, values)| row(field, operator, values));
                let made = pattern(&rows, None).map_err(|(number, why)| (number, why(words)));
                match operator {
                    "is-not" | "missing" => assert!(made.is_ok(), "{rows:?}: {made:?}"),
                    _ => assert_eq!(made, Err((2, words.is_not_alone)), "{rows:?}"),
                }
            }
        }
    }

    #[test]
    fn a_number_or_a_text_of_the_filter_stays_one_and_a_new_value_is_both() {
        let present = json!({ "n": [5, "6"], "m": [{ "anything-but": 7 }] });
        let [m, n] = [("m", "is-not", "7"), ("n", "is", "5\n6")];
        let same = made(&[m, n], Some(&present));
        assert_eq!(
            same,
            json!({ "n": [5, "6"], "m": [{ "anything-but": [7] }] })
        );
        assert_eq!(
            made(&[("n", "is", "7")], Some(&present)),
            json!({ "n": ["7", 7] })
        );
        assert_eq!(
            shown(&json!({ "n": ["1e2", 100.0, "007"] })).expect("shown")[0].2,
            "1e2|007"
        );
        // Which is no number that a filter can have.
        assert_eq!(
            made(&[("n", "is", "0.1234567890123456")], None),
            json!({ "n": ["0.1234567890123456"] })
        );
    }

    #[test]
    fn another_filter_is_not_shown_as_conditions() {
        for filter in [
            json!({ "a.b": ["x"] }),
            json!({ " a": ["x"] }),
            json!({ "a\nb": ["x"] }),
            json!({ "$topic": ["x"] }),
            json!({ "$header": { "x-shop": ["x"] } }),
            json!({ "a": [""] }),
            json!({ "a": ["x "] }),
            json!({ "a": ["x\ny"] }),
            json!({ "a": ["x\u{0}"] }),
            json!({ "a": [{ "anything-but": "x" }, { "anything-but": "y" }] }),
            json!({ "a": [{ "anything-but": { "prefix": "x" } }] }),
            json!({ "a": [{ "anything-but": [5] }, { "numeric": [">", 1] }] }),
            json!({ "a": [{ "anything-but": ["x"] }, { "exists": true }] }),
            json!({ "a": [{ "numeric": ["=", 1] }] }),
            json!({ "a": [{ "numeric": [">", 1] }, { "numeric": [">", 5, "<", 7] }] }),
            json!({ "a": [{ "numeric": ["<", 1] }, { "numeric": [">", 5] }] }),
        ] {
            assert!(Filter::new(&filter).is_ok(), "{filter}");
            assert_eq!(shown(&filter), None, "{filter}");
        }
    }

    #[test]
    fn the_condition_that_is_wrong_is_named_with_what_to_do() {
        let fine = row("a", "is", "x");
        let deep = vec!["a"; 17].join(".");
        let many = (0..101).map(|n| format!("v{n}\n")).collect::<String>();
        let numbers = (0..51).map(|n| format!("{n}\n")).collect::<String>();
        for (wrong, word) in [
            (row("", "is", "x"), (|words| words.name_a_field) as Word),
            (row("a..b", "is", "x"), |words| words.name_a_field),
            (row("$topic", "is", "x"), |words| words.name_a_field),
            (row("$header.x", "is", "x"), |words| words.name_a_field),
            (row("a.b", "is", "x"), |words| words.field_has_fields),
            (row("b", "is", " \n"), |words| words.values_needed),
            (row("b", "exists", "x"), |words| words.values_needed),
            (row("b", "like", "x"), |words| words.values_needed),
            (row("b", ">", "x"), |words| words.one_number),
            (row("b", ">", "1\n2"), |words| words.one_number),
            (row("b", ">", "0.1234567890123456"), |words| {
                words.one_number
            }),
            (row("b", ">", "true"), |words| words.one_number),
            (row(&deep, "is", "x"), |words| words.filter_too_large),
            (row("b", "is", &many), |words| words.filter_too_large),
            (row("b", "is", &numbers), |words| words.filter_too_large),
            (row("b", "is", &"x".repeat(4096)), |words| {
                words.filter_too_large
            }),
        ] {
            let words = Language::English.words();
            let refused = pattern(&[fine.clone(), wrong.clone()], None);
            let refused = refused.map_err(|(number, why)| (number, why(words)));
            assert_eq!(refused, Err((1, word(words))), "{wrong:?}");
        }
        let same = pattern(&vec![fine; 201], None).map_err(|(number, _)| number);
        assert_eq!(same, Err(100), "a row is a value");
        for (first, second) in [((">", "1"), (">=", "2")), ((">", "2"), ("<", "1"))] {
            let rows = [first, second].map(|(operator, value)| row("numeric", operator, value));
            let refused =
                pattern(&rows, None).map_err(|(at, why)| (at, why(Language::German.words())));
            assert_eq!(refused, Err((1, Language::German.words().lower_and_upper)));
        }
    }

    /// The alternatives of a pattern with their fields, as the parser of filters reads them.
    fn parts(pattern: &Value, path: &str, all: &mut BTreeSet<String>) {
        for (name, below) in pattern.as_object().expect("fields") {
            let path = format!("{path}/{name:?}");
            let Some(alternatives) = below.as_array() else {
                parts(below, &path, all);
                continue;
            };
            for alternative in alternatives {
                let mut alternative = alternative.clone();
                if let Some(values) = alternative
                    .get_mut("anything-but")
                    .filter(|values| !values.is_object())
                {
                    let unique: BTreeSet<String> =
                        listed(values).iter().map(Value::to_string).collect();
                    let unique = unique
                        .iter()
                        .map(|value| value.parse::<Value>().expect("JSON"));
                    *values = unique.collect();
                }
                let read = Filter::new(&json!({ "field": [alternative] })).expect("a filter");
                all.insert(format!("{path}: {read:?}"));
            }
        }
    }

    fn any_value() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a5 .\n]{0,3}",
            "[0-9]{1,3}",
            "-?[0-9]{1,3}(\\.[0-9]{1,2})?",
            "[1-9]e[0-2]",
            "true|null"
        ]
    }

    fn any_row() -> impl Strategy<Value = Condition> {
        let field = prop_oneof![4 => "[ab](\\.[cd]){0,2}", 1 => "[a.$ ]{0,3}"];
        let operator = prop::sample::select(OPERATORS.map(|(name, _)| name).to_vec());
        let values = prop::collection::vec(any_value(), 0..4).prop_map(|all| all.join("\n"));
        (field, operator, values)
            .prop_map(|(field, operator, values)| row(&field, operator, &values))
    }

    fn any_alternative() -> impl Strategy<Value = Value> {
        let scalar = || {
            prop_oneof![
                any_value().prop_map(Value::from),
                any_value().prop_map(|text| literal(&text).unwrap_or(Value::Null)),
            ]
        };
        let number = || {
            (-3_i32..3, any::<bool>()).prop_map(|(n, whole)| {
                if whole {
                    json!(n)
                } else {
                    json!(f64::from(n) / 2.0)
                }
            })
        };
        let relation = || prop::sample::select(vec!["=", "<", "<=", ">", ">="]);
        prop_oneof![
            4 => scalar(),
            1 => scalar().prop_map(|value| json!({ "anything-but": value })),
            1 => prop::collection::vec(scalar(), 1..4).prop_map(|all| json!({ "anything-but": all })),
            1 => any_value().prop_map(|text| json!({ "anything-but": { "prefix": text } })),
            1 => any_value().prop_map(|text| json!({ "prefix": text })),
            1 => any_value().prop_map(|text| json!({ "equals-ignore-case": text })),
            2 => (relation(), number()).prop_map(|(relation, bound)| json!({ "numeric": [relation, bound] })),
            1 => (-3..3, 1..4)
                .prop_map(|(low, more)| (low, low + more))
                .prop_map(|(low, high)| json!({ "numeric": ["<", high, ">=", low] })),
            1 => any::<bool>().prop_map(|is| json!({ "exists": is })),
        ]
    }

    fn any_pattern() -> impl Strategy<Value = Value> {
        let leaf = prop::collection::vec(any_alternative(), 1..5).prop_map(Value::from);
        let name = || prop_oneof![9 => "[a-d]|anything-but|numeric", 1 => "[a.$ ]{1,2}"];
        let field = leaf.prop_recursive(3, 8, 2, move |below| {
            prop::collection::hash_map(name(), below, 1..3)
                .prop_map(|all| all.into_iter().collect())
        });
        prop::collection::hash_map("[ab]|\\$topic", field, 1..3)
            .prop_map(|all| all.into_iter().collect())
    }

    proptest! {
        #[test]
        fn shown_conditions_make_the_same_filter_again(filter in any_pattern()) {
            if let Some(rows) = conditions(&filter).filter(|_| Filter::new(&filter).is_ok()) {
                let again = pattern(&rows, Some(&filter));
                let again = again.map_err(|(at, why)| (at, why(Language::English.words())));
                let again = again.expect("accepted").expect("a condition");
                let (mut before, mut after) = (BTreeSet::new(), BTreeSet::new());
                parts(&filter, "", &mut before);
                parts(&again, "", &mut after);
                prop_assert_eq!(before, after);
            }
        }

        #[test]
        fn an_accepted_form_is_shown_as_conditions_again(rows in prop::collection::vec(any_row(), 1..5)) {
            if let Ok(Some(filter)) = pattern(&rows, None) {
                prop_assert!(Filter::new(&filter).is_ok(), "{filter}");
                let shown = conditions(&filter);
                prop_assert!(shown.is_some(), "{rows:?}: {filter}");
                let again = pattern(&shown.unwrap_or_default(), Some(&filter)).ok().flatten();
                prop_assert_eq!(again.as_ref().map(sorted), Some(sorted(&filter)));
            }
        }
    }
}
