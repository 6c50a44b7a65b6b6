//! Any text and any change of a good file is read or refused, and no error shows a secret.

use std::fmt::Write;

use proptest::prelude::{Just, Strategy, any, prop_assert, prop_oneof, proptest};
use proptest::test_runner::TestCaseError;

use super::tests::{Good, read};
use super::*;

/// A part of each secret in the good file.
const PARTS: [&str; 5] = ["MfKQ9r8G", "Zm9vYmFy", "hunter22", "sauce777", "ToKeN555"];

/// A change of a text. Positions are taken modulo the length.
#[derive(Debug, Clone)]
enum Edit {
    Remove(usize, usize),
    Insert(usize, String),
    RemoveLine(usize),
    RepeatLine(usize, usize),
    SwapLines(usize, usize),
    /// Gives the value of a line to another key.
    TakeValue(usize, usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    let words = prop_oneof![
        Just("=".to_owned()),
        Just("\"".to_owned()),
        Just("\n".to_owned()),
        Just("[".to_owned()),
        Just("]".to_owned()),
        Just("'''".to_owned()),
        Just("\\".to_owned()),
        Just("-1".to_owned()),
        Just("99999999999999999999".to_owned()),
        Just("1e400".to_owned()),
        "\\PC{0,4}",
    ];
    let place = || any::<usize>();
    prop_oneof![
        (place(), 0..30_usize).prop_map(|(at, length)| Edit::Remove(at, length)),
        (place(), words).prop_map(|(at, word)| Edit::Insert(at, word)),
        place().prop_map(Edit::RemoveLine),
        (place(), place()).prop_map(|(from, to)| Edit::RepeatLine(from, to)),
        (place(), place()).prop_map(|(a, b)| Edit::SwapLines(a, b)),
        (place(), place()).prop_map(|(from, to)| Edit::TakeValue(from, to)),
    ]
}

fn edited(text: &str, edit: &Edit) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
    let count = lines.len();
    match *edit {
        Edit::Remove(at, length) => {
            let at = at % (chars.len() + 1);
            let end = (at + length).min(chars.len());
            return chars[..at].iter().chain(&chars[end..]).collect();
        }
        Edit::Insert(at, ref word) => {
            let (before, after) = chars.split_at(at % (chars.len() + 1));
            let word: Vec<char> = word.chars().collect();
            return [before, &word, after].concat().into_iter().collect();
        }
        Edit::RemoveLine(at) => drop(lines.remove(at % count)),
        Edit::RepeatLine(from, to) => lines.insert(to % count, lines[from % count].clone()),
        Edit::SwapLines(a, b) => lines.swap(a % count, b % count),
        Edit::TakeValue(from, to) => {
            let (from, to) = (from % count, to % count);
            if let (Some((_, value)), Some((key, _))) =
                (lines[from].split_once(" = "), lines[to].split_once(" = "))
            {
                lines[to] = format!("{key} = {value}");
            }
        }
    }
    lines.join("\n")
}

/// Asserts that an error, if any, contains no part of a secret.
fn tells_nothing(text: &str) -> Result<(), TestCaseError> {
    if let Err(error) = read(text) {
        let error = error.to_string();
        let shown = PARTS.iter().find(|part| error.contains(**part));
        prop_assert!(shown.is_none(), "{}\n{}", error, text);
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "(?s).{0,200}") {
        let _ = read(&text);
    }

    #[test]
    fn any_value_of_any_key_is_read_or_refused(
        at in any::<usize>(),
        value in prop_oneof![
            "[-+]?[0-9]{1,25}(\\.[0-9]{1,5})?(e[-+]?[0-9]{1,3})?",
            "\"[ -~&&[^\"\\\\]]{0,40}\"",
            "\\[(1|''|'a'|\\{\\}|true)(, (1|'a'))?\\]",
            "\\{(a|file|404|open) = ('a'|1|'1s')\\}",
            Just("true".to_owned()),
            Just("1979-05-27".to_owned()),
        ],
    ) {
        let top = keys();
        let own = destination::keys();
        let key = match at % (top.len() + own.len()) {
            at if at < top.len() => top[at].clone(),
            at => format!("destinations.a.{}", own[at - top.len()]),
        };
        let mut text = format!("{key} = {value}\n");
        if key.starts_with("destinations.a.") && key != "destinations.a.url" {
            writeln!(text, "destinations.a.url = 'http://a'").expect("writing to a string");
        }
        let mut config = Config::default();
        if apply_text(&text, &mut config).is_ok() {
            let _ = config.validate();
        }
    }

    #[test]
    fn deep_nesting_is_refused(depth in 1_usize..5000, open in "[\\[{]") {
        let _ = read(&format!("batch = {}", open.repeat(depth)));
        let _ = read(&format!("batch = {}", "{a=".repeat(depth)));
        let _ = read(&format!("{}a = 1", "a.".repeat(depth)));
    }
}

#[test]
fn no_change_of_a_good_file_makes_an_error_show_a_secret() {
    let good = Good::new();
    proptest!(|(edits in proptest::collection::vec(edit(), 1..6))| {
        let start = good.text.clone();
        tells_nothing(&edits.iter().fold(start, |text, edit| edited(&text, edit)))?;
    });
}

#[test]
fn no_value_under_another_key_is_shown() {
    let good = Good::new();
    let lines = good.text.split('\n').count();
    for from in 0..lines {
        for to in 0..lines {
            let text = edited(&good.text, &Edit::TakeValue(from, to));
            tells_nothing(&text).expect("no secret");
        }
    }
}
