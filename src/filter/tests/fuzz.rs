//! Random filters and payloads from a seed. `FILTER_SEED` and `FILTER_ROUNDS` choose others.

use std::time::{Duration, Instant};

use fastrand::Rng;

use super::super::decimal::Decimal;
use super::super::{Filter, FilterOutcome, evaluate};
use super::oracle;

/// The fuzz stops after this time, however many rounds are left.
const LIMIT: Duration = Duration::from_secs(2);
const ROUNDS: u64 = 20_000;

fn of_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Calls `round` with random numbers from a seed each, and names the seed of a round that fails.
fn rounds(round: impl Fn(&mut Rng)) -> u64 {
    struct Named(u64);
    impl Drop for Named {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("FILTER_SEED={} FILTER_ROUNDS=1", self.0);
            }
        }
    }
    let first = of_environment("FILTER_SEED").unwrap_or(1);
    let (asked, begun) = (of_environment("FILTER_ROUNDS"), Instant::now());
    let mut done = 0;
    while done < asked.unwrap_or(ROUNDS) && (asked.is_some() || begun.elapsed() < LIMIT) {
        let named = Named(first + done);
        round(&mut Rng::with_seed(named.0));
        done += 1;
    }
    done
}

fn one_of<'c>(rng: &mut Rng, choices: &[&'c str]) -> &'c str {
    rng.choice(choices).copied().unwrap_or_default()
}

const NAMES: &[&str] = &["a", "a", "a", "b", "b", "c", "é", "$topic", "k\\u0000"];
const TEXTS: &[&str] = &[
    "",
    "a",
    "b",
    "ab",
    "aB",
    "abc",
    "é",
    "É",
    "K",
    "k",
    "\u{212a}",
    "İ",
    "😀",
    "order.paid",
    "ß",
    "\\u0000",
];

/// With halves of surrogate pairs.
const HALVES: &[&str] = &[
    "\\ud83d",
    "a\\udc00b",
    "\\ud83d\\ud83d\\ude00",
    "\\ude00\\ud83d",
    "a\\ud83d",
];

/// A name or a text with quotes, perhaps with escapes.
fn quoted(rng: &mut Rng, text: &str) -> String {
    let mut quoted = String::from("\"");
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if let Some(escape) = rest.strip_prefix("\\u").and_then(|rest| rest.get(..4)) {
            quoted.push_str(&format!("\\u{escape}"));
            rest = &rest[6..];
            continue;
        }
        if rng.u8(..8) == 0 {
            for unit in c.encode_utf16(&mut [0; 2]) {
                quoted.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            quoted.push(c);
        }
        rest = &rest[c.len_utf8()..];
    }
    quoted.push('"');
    quoted
}

/// A number, of which many are equal and written in another way.
fn number(rng: &mut Rng) -> String {
    let sign = if rng.u8(..4) == 0 { "-" } else { "" };
    let digits = match rng.u8(..6) {
        0 => "0",
        1 => "1",
        2 => "12",
        3 => "1000000000000000000000000000001",
        4 => "100000000000000000000000000000000",
        _ => "12345678901234567890",
    };
    let fraction = one_of(
        rng,
        &["", "", ".0", ".5", ".50", ".000000000000000000000000000001"],
    );
    let exponent = match rng.u8(..4) {
        0 => format!(
            "{}{}{}",
            one_of(rng, &["e", "E"]),
            one_of(rng, &["", "+", "-"]),
            rng.u8(..40)
        ),
        1 => one_of(rng, &["e0", "E-00", "e+01", "e-1"]).to_owned(),
        _ => String::new(),
    };
    let small = one_of(rng, &["0.1", "1", "10e-1", "0.00", "100e-2"]);
    match rng.bool() {
        true => format!("{sign}{small}"),
        false => format!("{sign}{digits}{fraction}{exponent}"),
    }
}

fn scalar(rng: &mut Rng) -> String {
    match rng.u8(..8) {
        0 => "null".to_owned(),
        1 => one_of(rng, &["true", "false"]).to_owned(),
        2..=4 => number(rng),
        _ => {
            let text = one_of(rng, TEXTS);
            quoted(rng, text)
        }
    }
}

fn alternative(rng: &mut Rng) -> String {
    let text = |rng: &mut Rng| {
        let text = one_of(rng, TEXTS);
        quoted(rng, text)
    };
    match rng.u8(..12) {
        0 => format!(r#"{{"prefix": {}}}"#, text(rng)),
        1 => format!(r#"{{"suffix": {}}}"#, text(rng)),
        2 => format!(r#"{{"equals-ignore-case": {}}}"#, text(rng)),
        3 => format!(r#"{{"anything-but": {}}}"#, scalar(rng)),
        4 => format!(r#"{{"anything-but": [{}, {}]}}"#, scalar(rng), scalar(rng)),
        5 => format!(r#"{{"anything-but": {{"prefix": {}}}}}"#, text(rng)),
        6 => format!(
            r#"{{"numeric": ["{}", {}]}}"#,
            one_of(rng, &["=", "<", "<=", ">", ">="]),
            number(rng)
        ),
        7 => format!(
            r#"{{"numeric": ["{}", {}, "{}", {}]}}"#,
            one_of(rng, &["<", "<=", ">", ">="]),
            number(rng),
            one_of(rng, &["<", "<="]),
            number(rng)
        ),
        8 => format!(r#"{{"exists": {}}}"#, rng.bool()),
        _ => scalar(rng),
    }
}

fn alternatives(rng: &mut Rng) -> String {
    let count = rng.usize(1..4);
    let all: Vec<String> = (0..count).map(|_| alternative(rng)).collect();
    format!("[{}]", all.join(", "))
}

/// The fields of a filter. May name a field twice, of which the last counts.
fn pattern(rng: &mut Rng, depth: usize) -> String {
    let mut members = Vec::new();
    for _ in 0..rng.choice([1, 1, 1, 2, 3]).unwrap_or(1) {
        let name = one_of(rng, NAMES);
        let wants = match depth < 4 && rng.bool() && !(depth == 0 && name == "$topic") {
            true => pattern(rng, depth + 1),
            false => alternatives(rng),
        };
        members.push(format!("{}: {wants}", quoted(rng, name)));
    }
    if depth == 0 && rng.u8(..4) == 0 {
        let name = one_of(rng, &["x-a", "X-B"]);
        members.push(format!(r#""$header": {{"{name}": {}}}"#, alternatives(rng)));
    }
    format!("{{{}}}", members.join(", "))
}

/// A filter of one field.
fn small(rng: &mut Rng) -> String {
    match rng.u8(..3) {
        0 => format!(r#"{{"a": {{"b": {}}}}}"#, alternatives(rng)),
        _ => format!(r#"{{"a": {}}}"#, alternatives(rng)),
    }
}

/// A payload, with white space, repeated fields, escapes and halves of surrogate pairs.
fn payload(rng: &mut Rng, depth: usize) -> String {
    let kind = if depth == 0 {
        rng.u8(..12)
    } else {
        rng.u8(..20)
    };
    let white = one_of(rng, &["", "", " ", "\n\t", "\r"]);
    match kind {
        0..=6 if depth < 6 => {
            let count = if rng.u8(..50) == 0 {
                rng.usize(17..40)
            } else {
                rng.usize(..5)
            };
            let mut members = Vec::new();
            for _ in 0..count {
                let name = match rng.u8(..12) {
                    0 => "\\ud800",
                    1 => "other",
                    _ => one_of(rng, NAMES),
                };
                members.push(format!(
                    "{}{white}:{white}{}",
                    quoted(rng, name),
                    payload(rng, depth + 1)
                ));
            }
            format!("{{{white}{}{white}}}", members.join(","))
        }
        7..=10 if depth < 6 => {
            let count = rng.usize(..4);
            let items: Vec<String> = (0..count).map(|_| payload(rng, depth + 1)).collect();
            format!("[{white}{}{white}]", items.join(","))
        }
        // Near the limit of the depth.
        11 if rng.u8(..4) == 0 => {
            let arrays = rng.usize(56..68);
            format!(
                "{}{}{}",
                "[".repeat(arrays),
                payload(rng, depth + 1),
                "]".repeat(arrays)
            )
        }
        12 => {
            let text = one_of(rng, HALVES);
            quoted(rng, text)
        }
        _ => format!("{white}{}{white}", scalar(rng)),
    }
}

fn headers(rng: &mut Rng) -> Option<String> {
    let mut members = Vec::new();
    for _ in 0..rng.usize(..4) {
        let name = one_of(rng, &["x-a", "X-A", "x-b", "X-B", "y"]);
        members.push(format!(r#""{name}": {}"#, scalar(rng)));
    }
    rng.bool().then(|| format!("{{{}}}", members.join(", ")))
}

#[test]
fn filters_agree_with_the_oracle() {
    let counts = std::cell::Cell::new((0, 0));
    let done = rounds(|rng| {
        let (is_small, headers) = (rng.bool(), headers(rng));
        let payload = match is_small {
            true => format!("{{{}: {}}}", quoted(rng, "a"), payload(rng, 5)),
            false => payload(rng, 0),
        };
        let topic = one_of(rng, &["a", "order.paid"]);
        // The oracle reads the text, in which numbers are not rounded.
        let patterns = (0..rng.usize(2..12)).filter_map(|_| {
            let text = match is_small {
                true => small(rng),
                false => pattern(rng, 0),
            };
            let filter = text.parse().ok()?;
            // Of so many digits that those which are left are few.
            let read: serde_json::Value = serde_json::from_str(&text).ok()?;
            let is_rounded = oracle::read(&text) != oracle::read(&read.to_string());
            (!is_rounded).then_some((text, filter))
        });
        let (texts, filters): (Vec<_>, Vec<Filter>) = patterns.unzip();
        let all: Vec<&Filter> = filters.iter().collect();
        let outcomes = evaluate(&all, topic, headers.as_deref(), &payload);
        let (tree, of_headers) = (oracle::read(&payload), headers.as_deref().map(oracle::read));
        for ((filter, text), outcome) in all.iter().zip(texts).zip(outcomes) {
            let expected = oracle::matches(&oracle::read(&text), topic, of_headers.as_ref(), &tree);
            let expected = if expected {
                FilterOutcome::Matches
            } else {
                FilterOutcome::DoesNot
            };
            assert_eq!(outcome, expected, "{text}\n{payload}\n{headers:?}");
            let alone = evaluate(&[filter], topic, headers.as_deref(), &payload);
            assert_eq!(alone, [expected], "alone: {text}\n{payload}");
            let (matching, all) = counts.get();
            counts.set((
                matching + u64::from(expected == FilterOutcome::Matches),
                all + 1,
            ));
        }
    });
    let (matching, all) = counts.get();
    eprintln!("{done} payloads, {all} filters, {matching} match");
    assert!(
        done < 100 || (matching * 20 > all && matching * 20 < all * 19),
        "{matching} of {all}"
    );
}

#[test]
fn decimals_are_in_the_order_of_written_out_digits() {
    rounds(|rng| {
        let (one, other) = (number(rng), number(rng));
        let order = Decimal::read(&one).cmp(&Decimal::read(&other));
        assert_eq!(order, oracle::compare(&one, &other), "{one} {other}");
        assert_eq!(
            order.is_eq(),
            Decimal::read(&one) == Decimal::read(&other),
            "{one} {other}"
        );
    });
}

/// Changes, removes, doubles or moves some characters.
fn damaged(rng: &mut Rng, text: &str) -> String {
    let mut characters: Vec<char> = text.chars().collect();
    for _ in 0..rng.usize(1..4) {
        if characters.is_empty() {
            break;
        }
        let at = rng.usize(..characters.len());
        match rng.u8(..4) {
            0 => characters.truncate(at),
            1 => drop(characters.remove(at)),
            2 => {
                let from = [
                    '{', '}', '[', ']', '"', ',', ':', '\\', 'u', '0', '-', 'e', '.', 'é', '\0',
                ];
                characters[at] = rng.choice(from).unwrap_or(' ');
            }
            _ => {
                let other = rng.usize(..characters.len());
                characters.swap(at, other);
            }
        }
    }
    characters.into_iter().collect()
}

#[test]
fn damaged_filters_and_payloads_have_an_answer() {
    rounds(|rng| {
        let (text, whole) = (pattern(rng, 0), payload(rng, 0));
        let broken = damaged(rng, &whole);
        let of_damaged = damaged(rng, &text).parse::<Filter>().ok();
        for filter in text.parse::<Filter>().ok().iter().chain(&of_damaged) {
            evaluate(&[filter], "a", Some(&broken), &broken);
            evaluate(&[filter], "a", Some(&whole), &whole);
        }
    });
}
