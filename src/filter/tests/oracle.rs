//! A second version of filters, as plain as can be: a tree of the whole payload, and a search through it without limits.
//! It shares no code with the first.

use std::cmp::Ordering;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Json {
    Null,
    Boolean(bool),
    Number(String),
    Text(Vec<u16>),
    Array(Vec<Json>),
    Object(Vec<(Vec<u16>, Json)>),
}

pub(super) fn read(text: &str) -> Json {
    let characters: Vec<char> = text.chars().collect();
    let mut at = 0;
    let json = read_at(&characters, &mut at);
    skip_white(&characters, &mut at);
    assert_eq!(at, characters.len(), "{text}");
    json
}

fn skip_white(text: &[char], at: &mut usize) {
    while *at < text.len() && text[*at].is_ascii_whitespace() {
        *at += 1;
    }
}

/// Skips white space and perhaps this character.
fn skip(text: &[char], at: &mut usize, character: char) -> bool {
    skip_white(text, at);
    let is_there = text[*at] == character;
    if is_there {
        *at += 1;
    }
    is_there
}

fn read_at(text: &[char], at: &mut usize) -> Json {
    skip_white(text, at);
    match text[*at] {
        '{' => {
            *at += 1;
            let mut members = Vec::new();
            while !skip(text, at, '}') {
                let Json::Text(name) = read_at(text, at) else {
                    panic!("a name")
                };
                assert!(skip(text, at, ':'));
                members.push((name, read_at(text, at)));
                skip(text, at, ',');
            }
            Json::Object(members)
        }
        '[' => {
            *at += 1;
            let mut items = Vec::new();
            while !skip(text, at, ']') {
                items.push(read_at(text, at));
                skip(text, at, ',');
            }
            Json::Array(items)
        }
        '"' => {
            *at += 1;
            let mut units = Vec::new();
            while text[*at] != '"' {
                if text[*at] == '\\' {
                    units.push(escape(text, at));
                } else {
                    units.extend_from_slice(text[*at].encode_utf16(&mut [0; 2]));
                    *at += 1;
                }
            }
            *at += 1;
            Json::Text(units)
        }
        _ => {
            let begin = *at;
            while *at < text.len() && !",]} \n\t\r".contains(text[*at]) {
                *at += 1;
            }
            let word: String = text[begin..*at].iter().collect();
            match word.as_str() {
                "null" => Json::Null,
                "true" => Json::Boolean(true),
                "false" => Json::Boolean(false),
                _ => Json::Number(word),
            }
        }
    }
}

fn escape(text: &[char], at: &mut usize) -> u16 {
    let kind = text[*at + 1];
    *at += 2;
    match kind {
        'u' => {
            let digits: String = text[*at..*at + 4].iter().collect();
            *at += 4;
            u16::from_str_radix(&digits, 16).expect("four digits")
        }
        'n' => 10,
        't' => 9,
        'r' => 13,
        'b' => 8,
        'f' => 12,
        other => other as u16,
    }
}

/// Whether a filter matches.
pub(super) fn matches(filter: &Json, topic: &str, headers: Option<&Json>, payload: &Json) -> bool {
    let units = |text: &str| -> Vec<u16> { text.encode_utf16().collect() };
    let Json::Object(wanted) = filter else {
        panic!("an object")
    };
    let topic = Json::Text(units(topic));
    let lower = |json: &Json| match json {
        Json::Object(members) => {
            let lower = |(name, value): &(Vec<u16>, Json)| {
                let name = String::from_utf16(name)
                    .expect("a name")
                    .to_ascii_lowercase();
                (units(&name), value.clone())
            };
            Json::Object(members.iter().map(lower).collect())
        }
        _ => panic!("an object"),
    };
    let headers = headers.map(lower);
    let mut of_payload = Vec::new();
    for (name, wants) in wanted {
        let is_met = if *name == units("$topic") {
            field(wants, Some((&topic, 0)))
        } else if *name == units("$header") {
            let Json::Object(wanted) = lower(wants) else {
                panic!("an object")
            };
            object(&wanted, headers.as_ref().map(|headers| (headers, 0)))
        } else {
            of_payload.push((name.clone(), wants.clone()));
            true
        };
        if !is_met {
            return false;
        }
    }
    of_payload.is_empty() || object(&of_payload, Some((payload, 0)))
}

/// A value, and how many objects and arrays it stands in.
type At<'j> = Option<(&'j Json, usize)>;

/// Whether one object has all these fields.
fn object(wanted: &[(Vec<u16>, Json)], at: At<'_>) -> bool {
    let nothing = Json::Object(Vec::new());
    let mut objects = Vec::new();
    if let Some((json, depth)) = at {
        find_objects(json, depth, &mut objects);
    }
    if objects.is_empty() {
        objects.push((&nothing, 0));
    }
    objects.into_iter().any(|(json, depth)| {
        let Json::Object(members) = json else {
            return false;
        };
        depth < 64
            && wanted.iter().all(|(name, wants)| {
                let mut of_name = members.iter().filter(|(other, _)| other == name);
                field(
                    wants,
                    of_name.next_back().map(|(_, value)| (value, depth + 1)),
                )
            })
    })
}

/// All objects here, and the arrays that are too deep to look into.
fn find_objects<'j>(json: &'j Json, depth: usize, found: &mut Vec<(&'j Json, usize)>) {
    match json {
        Json::Object(_) => found.push((json, depth)),
        Json::Array(_) if depth >= 64 => found.push((json, depth)),
        Json::Array(items) => items
            .iter()
            .for_each(|item| find_objects(item, depth + 1, found)),
        _ => {}
    }
}

fn field(wants: &Json, at: At<'_>) -> bool {
    match wants {
        Json::Object(wanted) => object(wanted, at),
        Json::Array(alternatives) => alternatives.iter().any(|one| alternative(one, at)),
        _ => panic!("{wants:?}"),
    }
}

fn alternative(wanted: &Json, at: At<'_>) -> bool {
    if let Some(("exists", Json::Boolean(exists))) = operator(wanted)
        .as_ref()
        .map(|(name, value)| (name.as_str(), *value))
    {
        return *exists == at.is_some();
    }
    let mut scalars = Vec::new();
    if let Some((json, depth)) = at {
        find_scalars(json, depth, &mut scalars);
    }
    scalars.into_iter().any(|scalar| test(wanted, scalar))
}

fn find_scalars<'j>(json: &'j Json, depth: usize, found: &mut Vec<&'j Json>) {
    match json {
        Json::Object(_) => {}
        Json::Array(_) if depth >= 64 => {}
        Json::Array(items) => items
            .iter()
            .for_each(|item| find_scalars(item, depth + 1, found)),
        _ => found.push(json),
    }
}

fn operator(wanted: &Json) -> Option<(String, &Json)> {
    let Json::Object(members) = wanted else {
        return None;
    };
    let (name, value) = &members[0];
    Some((String::from_utf16(name).expect("a name"), value))
}

fn test(wanted: &Json, scalar: &Json) -> bool {
    let Some((name, value)) = operator(wanted) else {
        return is_equal(wanted, scalar);
    };
    match (name.as_str(), value, scalar) {
        ("anything-but", Json::Object(_), Json::Text(_)) => !test(value, scalar),
        ("anything-but", Json::Object(_), _) => true,
        ("anything-but", Json::Array(values), _) => !values.iter().any(|one| is_equal(one, scalar)),
        ("anything-but", _, _) => !is_equal(value, scalar),
        ("prefix", Json::Text(wanted), Json::Text(text)) => text.starts_with(wanted),
        ("suffix", Json::Text(wanted), Json::Text(text)) => text.ends_with(wanted),
        ("equals-ignore-case", Json::Text(wanted), Json::Text(text)) => {
            match (String::from_utf16(wanted), String::from_utf16(text)) {
                (Ok(wanted), Ok(text)) => lower(&wanted) == lower(&text),
                _ => false,
            }
        }
        ("numeric", Json::Array(bounds), Json::Number(number)) => {
            bounds.chunks(2).all(|pair| match pair {
                [Json::Text(relation), Json::Number(bound)] => {
                    let order = compare(number, bound);
                    match String::from_utf16(relation).expect("a relation").as_str() {
                        "=" => order.is_eq(),
                        "<" => order.is_lt(),
                        "<=" => order.is_le(),
                        ">" => order.is_gt(),
                        ">=" => order.is_ge(),
                        other => panic!("{other}"),
                    }
                }
                other => panic!("{other:?}"),
            })
        }
        _ => false,
    }
}

fn lower(text: &str) -> String {
    let lower = |c: char| c.to_lowercase().collect::<String>();
    text.chars().map(lower).collect()
}

fn is_equal(one: &Json, other: &Json) -> bool {
    match (one, other) {
        (Json::Number(one), Json::Number(other)) => compare(one, other).is_eq(),
        _ => one == other,
    }
}

/// Compares numbers as they are written, digit by digit. For small exponents.
pub(super) fn compare(one: &str, other: &str) -> Ordering {
    let ((one_negative, one), (other_negative, other)) = (written_out(one), written_out(other));
    let (whole, fraction) = (
        one.0.len().max(other.0.len()),
        one.1.len().max(other.1.len()),
    );
    let padded = |(w, f): &(String, String)| format!("{w:0>whole$}{f:0<fraction$}");
    let (one, other) = (padded(&one), padded(&other));
    let is_zero = |text: &str| text.bytes().all(|digit| digit == b'0');
    match (
        one_negative && !is_zero(&one),
        other_negative && !is_zero(&other),
    ) {
        (false, false) => one.cmp(&other),
        (true, true) => other.cmp(&one),
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
    }
}

/// Whether a number is negative, its digits before the point and those after.
fn written_out(number: &str) -> (bool, (String, String)) {
    let number = number.to_ascii_lowercase();
    let (digits, exponent) = number.split_once('e').unwrap_or((&number, "0"));
    let exponent: i64 = exponent.parse().expect("a small exponent");
    let is_negative = digits.starts_with('-');
    let digits = digits.trim_start_matches('-');
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let (mut whole, mut fraction) = (whole.to_owned(), fraction.to_owned());
    for _ in 0..exponent.abs() {
        if exponent > 0 {
            whole.push(if fraction.is_empty() {
                '0'
            } else {
                fraction.remove(0)
            });
        } else {
            fraction.insert(0, whole.pop().unwrap_or('0'));
        }
    }
    (is_negative, (whole, fraction))
}
