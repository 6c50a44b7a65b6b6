//! Masks payloads, headers and responses: names stay, and each value becomes its type and size.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// Elements shown of an array.
const MOST_ELEMENTS: usize = 20;
/// Longest masked text, in bytes.
const MOST_BYTES: usize = 64 * 1024;

/// JSON with its keys and masked values.
pub(super) fn json(text: &str) -> String {
    let mut out = String::new();
    let mut reader = serde_json::Deserializer::from_str(text);
    let masked = Masked {
        out: &mut out,
        depth: 0,
    };
    let read = masked.deserialize(&mut reader);
    if out.len() > MOST_BYTES {
        out.push_str("\n… and more");
    } else if read.is_err() || reader.end().is_err() {
        // PostgreSQL's json accepts texts that this parser rejects: deep nesting, lone surrogates.
        return format!("‹{} bytes that cannot be masked›", text.len());
    }
    out
}

/// A text, such as a receiver's response.
pub(super) fn text(text: &str) -> String {
    format!("‹text, {}›", characters(text))
}

/// The stored JSON with line breaks and indentation. Only white space changes: numbers and the order of keys stay.
pub(crate) fn indented(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let (mut depth, mut in_string, mut is_escaped) = (0, false, false);
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        if in_string {
            out.push(c);
            in_string = c != '"' || is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            continue;
        }
        match c {
            '"' => {
                in_string = true;
                out.push(c);
            }
            '{' | '[' => {
                while characters.next_if(|c| c.is_ascii_whitespace()).is_some() {}
                out.push(c);
                if characters
                    .peek()
                    .is_some_and(|next| matches!(next, '}' | ']'))
                {
                    out.extend(characters.next());
                } else {
                    depth += 1;
                    new_line(&mut out, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                new_line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                new_line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            c if c.is_ascii_whitespace() => {}
            c => out.push(c),
        }
    }
    out
}

fn new_line(out: &mut String, depth: usize) {
    // Without a limit, deep nesting would make the output quadratic.
    let spaces = depth.min(40) * 2;
    out.push('\n');
    out.extend(std::iter::repeat_n(' ', spaces));
}

fn characters(text: &str) -> String {
    super::words::counted(
        i64::try_from(text.chars().count()).unwrap_or(i64::MAX),
        "character",
        "characters",
    )
}

/// Writes the masked form of the JSON that it reads.
struct Masked<'a> {
    out: &'a mut String,
    depth: usize,
}

impl Masked<'_> {
    fn write<E: Error>(&mut self, words: &str) -> Result<(), E> {
        self.out.push_str(words);
        if self.out.len() > MOST_BYTES {
            return Err(E::custom("too long"));
        }
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        new_line(self.out, depth);
    }

    fn inner(&mut self) -> Masked<'_> {
        Masked {
            out: self.out,
            depth: self.depth + 1,
        }
    }
}

impl<'de> DeserializeSeed<'de> for Masked<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Masked<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(mut self) -> Result<(), E> {
        self.write("null")
    }

    fn visit_bool<E: Error>(mut self, _: bool) -> Result<(), E> {
        self.write("‹boolean›")
    }

    fn visit_i64<E: Error>(mut self, _: i64) -> Result<(), E> {
        self.write("‹number›")
    }

    fn visit_u64<E: Error>(mut self, _: u64) -> Result<(), E> {
        self.write("‹number›")
    }

    fn visit_f64<E: Error>(mut self, _: f64) -> Result<(), E> {
        self.write("‹number›")
    }

    fn visit_str<E: Error>(mut self, value: &str) -> Result<(), E> {
        self.write(&format!("‹string, {}›", characters(value)))
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut elements: A) -> Result<(), A::Error> {
        let depth = self.depth;
        let mut count = 0_usize;
        self.write("[")?;
        while count < MOST_ELEMENTS {
            let before = self.out.len();
            if count > 0 {
                self.write(",")?;
            }
            self.line(depth + 1);
            if elements.next_element_seed(self.inner())?.is_none() {
                self.out.truncate(before);
                break;
            }
            count += 1;
        }
        let mut more = 0_i64;
        while elements.next_element::<serde::de::IgnoredAny>()?.is_some() {
            more += 1;
        }
        if more > 0 {
            self.line(depth + 1);
            self.write(&format!("… {} more", super::words::count(more, false)))?;
        }
        if count > 0 {
            self.line(depth);
        }
        self.write("]")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        let depth = self.depth;
        let mut count = 0_usize;
        self.write("{")?;
        while let Some(key) = entries.next_key::<String>()? {
            if count > 0 {
                self.write(",")?;
            }
            count += 1;
            self.line(depth + 1);
            let key = serde_json::to_string(&key).map_err(A::Error::custom)?;
            self.write(&format!("{key}: "))?;
            entries.next_value_seed(self.inner())?;
        }
        if count > 0 {
            self.line(depth);
        }
        self.write("}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// Keys are lower case, strings are upper case, and numbers have eight digits.
    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            (10_000_000_u64..99_999_999).prop_map(Value::from),
            (10_000_000_u32..99_999_999).prop_map(|n| json!(-f64::from(n) / 7.0)),
            "[A-Z\"\\\\<>&'€\u{1}]{1,30}".prop_map(Value::from),
        ];
        leaf.prop_recursive(6, 64, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..30).prop_map(Value::from),
                prop::collection::hash_map("[a-z\"<]{1,8}", inner, 0..8)
                    .prop_map(|map| map.into_iter().collect::<Value>()),
            ]
        })
    }

    fn keys(value: &Value, all: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    all.push(serde_json::to_string(key).expect("a string"));
                    keys(value, all);
                }
            }
            // Only the elements that are shown.
            Value::Array(elements) => {
                for value in elements.iter().take(MOST_ELEMENTS) {
                    keys(value, all);
                }
            }
            _ => {}
        }
    }

    proptest! {
        #[test]
        fn no_value_is_in_the_masked_text_and_every_key_is(value in any_json()) {
            let masked = json(&value.to_string());
            prop_assert!(!masked.contains(|c: char| c.is_ascii_uppercase() || c == '€'), "{masked}");
            let digits = masked.split(|c: char| !c.is_ascii_digit());
            prop_assert!(digits.map(str::len).all(|length| length < 5), "{masked}");
            let mut all = Vec::new();
            keys(&value, &mut all);
            for key in all {
                prop_assert!(masked.contains(&key), "{key} of {value}: {masked}");
            }
        }

        #[test]
        fn indented_json_is_the_same_json(value in any_json()) {
            let text = value.to_string();
            let indented = indented(&text);
            let read = |text: &str| text.parse::<Value>().expect("JSON");
            prop_assert_eq!(read(&indented), read(&text));
            // Indenting again changes nothing.
            prop_assert_eq!(super::indented(&indented), indented);
        }

        #[test]
        fn any_text_at_all_is_masked_or_left_out(text in "\\PC{0,200}") {
            let masked = json(&format!("[\"{text}"));
            prop_assert!(masked.contains("cannot be masked"), "{masked}");
            indented(&text);
        }
    }

    #[test]
    fn kinds_and_sizes_are_shown() {
        let masked = json(r#"{"b":"äö","a":[1,true,null,{}],"empty":[]}"#);
        let expected = "{\n  \"b\": ‹string, 2 characters›,\n  \"a\": [\n    ‹number›,\n    ‹boolean›,\n    null,\n    {}\n  ],\n  \"empty\": []\n}";
        assert_eq!(masked, expected);
        assert_eq!(text("secret"), "‹text, 6 characters›");
    }

    #[test]
    fn long_arrays_and_texts_are_cut() {
        let masked = json(&json!(vec!["X"; 500]).to_string());
        assert!(masked.contains("… 480 more"), "{masked}");
        let object: serde_json::Map<String, Value> = (0..100_000)
            .map(|n| (format!("key{n}"), "X".into()))
            .collect();
        let masked = json(&Value::Object(object).to_string());
        assert!(masked.len() < MOST_BYTES + 1000);
        assert!(masked.ends_with("… and more") && !masked.contains('X'));
    }

    #[test]
    fn unreadable_content_is_left_out() {
        for text in [
            format!("{}1{}", "[".repeat(500), "]".repeat(500)),
            r#"{"SECRET": "\ud800"}"#.to_owned(),
            "SECRET".to_owned(),
            r#"{"a": 1} SECRET"#.to_owned(),
        ] {
            let masked = json(&text);
            assert!(!masked.contains("SECRET"), "{masked}");
            assert!(masked.contains("cannot be masked"), "{masked}");
        }
    }

    #[test]
    fn numbers_and_order_stay_as_they_are_stored() {
        let text = r#"{"z":1.00000000000000000001,"a":"x, {y}: \"","e":{ } }"#;
        let expected =
            "{\n  \"z\": 1.00000000000000000001,\n  \"a\": \"x, {y}: \\\"\",\n  \"e\": {}\n}";
        assert_eq!(indented(text), expected);
    }
}
