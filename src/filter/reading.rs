//! Reads those fields of a payload that filters name.
//!
//! `serde_json` would refuse the whole payload for a number that an `f64` cannot hold, or for half of a surrogate pair. With
//! raw values it would not, but would go through a value once for each object around it. So this goes through the text,
//! once; PostgreSQL has checked it. What no filter names is skipped, and not even unescaped.

use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

use super::decimal::Decimal;
use super::{BUDGET, Filter, MAX_PAYLOAD_DEPTH, PatternField, Scalar};

/// The places of the objects that fields at the top stand in.
pub(super) const TOP: u64 = 0;
pub(super) const TOP_OF_HEADERS: u64 = 1;

/// So many fields are searched one by one.
const FEW: usize = 16;

/// The place of a field: the hash of its name and of the place of its object. Elements of an array stand where the array
/// stands. Places only save time: fields are told apart by their names.
pub(super) fn place(object: u64, name: &[u8]) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let mut hasher = KEYS.build_hasher();
    hasher.write_u64(object);
    hasher.write(name);
    hasher.finish()
}

/// What was read of a payload.
#[derive(Debug)]
pub(super) enum Value<'p> {
    Scalar(Scalar<'p>),
    Array(Vec<Value<'p>>),
    Object(Object<'p>),
    /// An object or an array that was not read, because it is no JSON or stands too deep.
    Unread,
}

/// The named fields of an object: a few as they stand there, many sorted by place and name, and fields of the same name
/// as they stand there.
#[derive(Debug)]
pub(super) struct Object<'p>(Vec<Member<'p>>);

#[derive(Debug)]
struct Member<'p> {
    place: u64,
    name: Cow<'p, [u8]>,
    value: Value<'p>,
}

impl<'p> Object<'p> {
    fn of(mut members: Vec<Member<'p>>) -> Self {
        if members.len() > FEW {
            members.sort_by(|a, b| a.key().cmp(&b.key()));
        }
        Self(members)
    }

    /// The last field of this name.
    pub(super) fn find(&self, field: &PatternField) -> Option<&Value<'p>> {
        let Self(members) = self;
        let wanted = (field.place, &*field.name);
        let last = if members.len() > FEW {
            let end = members.partition_point(|one| one.key() <= wanted);
            members
                .get(end.checked_sub(1)?)
                .filter(|one| one.key() == wanted)
        } else {
            members.iter().rfind(|one| one.key() == wanted)
        };
        last.map(|one| &one.value)
    }
}

impl Member<'_> {
    fn key(&self) -> (u64, &[u8]) {
        (self.place, &self.name)
    }
}

/// The places of the fields that are read, and of few others: a bit for each, in a table that is sixteen times as large.
/// (A set took longer to make than the rest of an evaluation.)
pub(super) struct Places(Vec<u64>);

impl Places {
    fn of<'f>(places: impl Iterator<Item = &'f u64> + Clone) -> Self {
        let words = (places.clone().count() / 4).next_power_of_two();
        let mut bits = Self(vec![0; words]);
        for place in places {
            let (word, bit) = bits.bit(*place);
            bits.0[word] |= bit;
        }
        bits
    }

    // The number of words is a power of two.
    #[allow(clippy::cast_possible_truncation)]
    fn bit(&self, place: u64) -> (usize, u64) {
        (
            (place >> 6) as usize & (self.0.len() - 1),
            1 << (place & 63),
        )
    }

    fn contains(&self, place: u64) -> bool {
        let (word, bit) = self.bit(place);
        self.0[word] & bit != 0
    }
}

/// Reads the fields of a payload that these filters name.
pub(super) fn payload<'p>(json: &'p str, filters: &[&Filter]) -> Value<'p> {
    let places = filters.iter().flat_map(|filter| &filter.places);
    document(json, &Places::of(places), TOP)
}

/// Reads the headers of a message that these filters name, which are the fields of an object.
pub(super) fn headers<'p>(json: &'p str, filters: &[&Filter]) -> Value<'p> {
    let all = filters.iter().flat_map(|filter| &filter.headers);
    let places = all.map(|field| &field.place);
    document(json, &Places::of(places), TOP_OF_HEADERS)
}

fn document<'p>(json: &'p str, places: &Places, top: u64) -> Value<'p> {
    let mut scan = Scan {
        json,
        at: 0,
        places,
    };
    let whole = scan.value(top, 0);
    let is_all = scan.peek().is_none();
    whole.filter(|_| is_all).unwrap_or(Value::Unread)
}

/// Goes through JSON, once. PostgreSQL has checked it; in other text, `None` is where it does not go on.
struct Scan<'p, 's> {
    json: &'p str,
    at: usize,
    places: &'s Places,
}

impl<'p> Scan<'p, '_> {
    /// A value in so many objects and arrays.
    fn value(&mut self, place: u64, depth: usize) -> Option<Value<'p>> {
        let scalar = match self.peek()? {
            b'{' | b'[' if depth == MAX_PAYLOAD_DEPTH => {
                self.skip()?;
                return Some(Value::Unread);
            }
            b'{' => return self.object(place, depth + 1),
            b'[' => return self.array(place, depth + 1),
            b'"' => Scalar::Text(unescaped(self.text()?)?),
            b'-' | b'0'..=b'9' => Scalar::Number(Decimal::read(self.word()?)),
            _ => match self.word()? {
                "true" => Scalar::Boolean(true),
                "false" => Scalar::Boolean(false),
                "null" => Scalar::Null,
                _ => return None,
            },
        };
        Some(Value::Scalar(scalar))
    }

    fn object(&mut self, object: u64, depth: usize) -> Option<Value<'p>> {
        let mut members = Vec::new();
        self.at += 1;
        let mut has_ended = self.eat(b'}');
        while !has_ended {
            let mut name = match self.peek()? {
                b'"' => unescaped(self.text()?)?,
                _ => return None,
            };
            if object == TOP_OF_HEADERS {
                name = name.to_ascii_lowercase().into();
            }
            self.eat(b':').then_some(())?;
            let place = place(object, &name);
            if self.places.contains(place) {
                let value = self.value(place, depth)?;
                members.push(Member { place, name, value });
            } else {
                self.skip()?;
            }
            has_ended = !self.eat(b',');
            if has_ended {
                self.eat(b'}').then_some(())?;
            }
        }
        Some(Value::Object(Object::of(members)))
    }

    fn array(&mut self, place: u64, depth: usize) -> Option<Value<'p>> {
        let mut items = Vec::new();
        self.at += 1;
        let mut has_ended = self.eat(b']');
        while !has_ended {
            // No filter has the steps to visit more of them.
            if items.len() < BUDGET as usize {
                items.push(self.value(place, depth)?);
            } else {
                self.skip()?;
            }
            has_ended = !self.eat(b',');
            if has_ended {
                self.eat(b']').then_some(())?;
            }
        }
        Some(Value::Array(items))
    }

    /// The next byte that is no white space.
    fn peek(&mut self) -> Option<u8> {
        let bytes = self.json.as_bytes();
        while matches!(bytes.get(self.at)?, b' ' | b'\t' | b'\n' | b'\r') {
            self.at += 1;
        }
        bytes.get(self.at).copied()
    }

    fn eat(&mut self, wanted: u8) -> bool {
        let is_there = self.peek() == Some(wanted);
        self.at += usize::from(is_there);
        is_there
    }

    /// A text, within its quotes.
    fn text(&mut self) -> Option<&'p str> {
        let begin = self.at + 1;
        let mut end = begin;
        loop {
            let rest = self.json.as_bytes().get(end..)?;
            end += rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
            if self.json.as_bytes()[end] == b'"' {
                break;
            }
            end += 2;
        }
        self.at = end + 1;
        self.json.get(begin..end)
    }

    /// A number, `true`, `false` or `null`.
    fn word(&mut self) -> Option<&'p str> {
        let rest = self.json.get(self.at..)?;
        let is_part =
            |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let length = rest.bytes().take_while(is_part).count();
        self.at += length;
        rest.get(..length).filter(|word| !word.is_empty())
    }

    /// Skips a value.
    fn skip(&mut self) -> Option<()> {
        match self.peek()? {
            b'{' | b'[' => {}
            b'"' => return self.text().map(drop),
            _ => return self.word().map(drop),
        }
        let bytes = self.json.as_bytes();
        let mut depth = 0_usize;
        loop {
            let is_next = |byte: &u8| matches!(byte, b'"' | b'{' | b'}' | b'[' | b']');
            self.at += bytes.get(self.at..)?.iter().position(is_next)?;
            match bytes[self.at] {
                b'"' => drop(self.text()?),
                b'{' | b'[' => (depth, self.at) = (depth + 1, self.at + 1),
                _ => (depth, self.at) = (depth - 1, self.at + 1),
            }
            if depth == 0 {
                return Some(());
            }
        }
    }
}

/// A text of JSON without escapes. Halves of surrogate pairs are three bytes.
fn unescaped(text: &str) -> Option<Cow<'_, [u8]>> {
    if !text.contains('\\') {
        return Some(Cow::Borrowed(text.as_bytes()));
    }
    let text: TextBytes = serde_json::from_str(&format!("\"{text}\"")).ok()?;
    Some(Cow::Owned(text.0))
}

/// What `serde_json` makes of a text where bytes are wanted.
struct TextBytes(Vec<u8>);

impl<'j> Deserialize<'j> for TextBytes {
    fn deserialize<D: Deserializer<'j>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = TextBytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<TextBytes, E> {
                Ok(TextBytes(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}
