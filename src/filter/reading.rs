//! Reads those fields of a payload that filters name.
//!
//! The values of named fields are taken as raw text first: `serde_json` would refuse the whole payload for a number that
//! an `f64` cannot hold, or for half of a surrogate pair. All else is skipped, and not even unescaped.

use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::decimal::Decimal;
use super::{Field, Filter, MAX_PAYLOAD_DEPTH, Scalar};

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

/// What is read of a payload.
#[derive(Debug)]
pub(super) enum Value<'p> {
    Scalar(Scalar<'p>),
    Array(Vec<Value<'p>>),
    Object(Object<'p>),
    /// An object or an array that is not read, because it is no JSON or stands too deep.
    Unread,
}

/// The named fields of an object: a few as they stand there, many sorted by place and name, and fields of the same name
/// as they stand there.
#[derive(Debug)]
pub(super) struct Object<'p>(Vec<Member<'p>>);

#[derive(Debug)]
struct Member<'p> {
    place: u64,
    name: Text<'p>,
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
    pub(super) fn find(&self, field: &Field) -> Option<&Value<'p>> {
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
        (self.place, &self.name.0)
    }
}

/// The places of the fields that are read, and perhaps a few more: one bit for each, of as many bits as no message's
/// filters fill. (A set of places took half of the time of an evaluation.)
pub(super) struct Places([u64; 64]);

impl Places {
    fn of<'f>(places: impl Iterator<Item = &'f u64>) -> Self {
        let mut bits = [0; 64];
        for place in places {
            let (word, bit) = Self::bit(*place);
            bits[word] |= bit;
        }
        Self(bits)
    }

    fn bit(place: u64) -> (usize, u64) {
        ((place >> 58) as usize, 1 << (place & 63))
    }

    fn contains(&self, place: u64) -> bool {
        let (word, bit) = Self::bit(place);
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

fn document<'p>(json: &'p str, places: &Places, object: u64) -> Value<'p> {
    let json = json.trim_matches([' ', '\t', '\n', '\r']);
    if !json.starts_with(['{', '[']) && serde_json::from_str::<IgnoredAny>(json).is_err() {
        return Value::Unread;
    }
    let depth = 0;
    Inside {
        places,
        object,
        depth,
    }
    .read(json)
}

/// Where values stand: at this place, in so many objects and arrays.
#[derive(Clone, Copy)]
struct Inside<'r> {
    places: &'r Places,
    object: u64,
    depth: usize,
}

impl Inside<'_> {
    /// Reads a value, with which the text begins and ends.
    fn read<'p>(self, json: &'p str) -> Value<'p> {
        let scalar = match json.as_bytes().first() {
            Some(b'{' | b'[') if self.depth == MAX_PAYLOAD_DEPTH => return Value::Unread,
            Some(b'{' | b'[') => {
                let depth = self.depth + 1;
                let mut reader = serde_json::Deserializer::from_str(json);
                let value = reader.deserialize_any(Inside { depth, ..self });
                let value = value.and_then(|value| reader.end().map(|()| value));
                return value.unwrap_or(Value::Unread);
            }
            Some(b'"') => match text(json) {
                Some(text) => Scalar::Text(text),
                None => return Value::Unread,
            },
            Some(b't') => Scalar::Boolean(true),
            Some(b'f') => Scalar::Boolean(false),
            Some(b'n') => Scalar::Null,
            _ => Scalar::Number(Decimal::read(json)),
        };
        Value::Scalar(scalar)
    }
}

fn text(json: &str) -> Option<Cow<'_, [u8]>> {
    let plain = json.strip_prefix('"')?.strip_suffix('"')?;
    if !plain.contains('\\') {
        return Some(Cow::Borrowed(plain.as_bytes()));
    }
    let text: Text<'_> = serde_json::from_str(json).ok()?;
    Some(text.0)
}

impl<'p> Visitor<'p> for Inside<'_> {
    type Value = Value<'p>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'p>>(self, mut map: A) -> Result<Value<'p>, A::Error> {
        let mut members = Vec::new();
        while let Some(mut name) = map.next_key::<Text<'p>>()? {
            if self.object == TOP_OF_HEADERS {
                name.0 = Cow::Owned(name.0.to_ascii_lowercase());
            }
            let place = place(self.object, &name.0);
            if !self.places.contains(place) {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let inside = Inside {
                object: place,
                ..self
            };
            let value = inside.read(map.next_value::<&RawValue>()?.get());
            members.push(Member { place, name, value });
        }
        Ok(Value::Object(Object::of(members)))
    }

    fn visit_seq<A: SeqAccess<'p>>(self, mut seq: A) -> Result<Value<'p>, A::Error> {
        let mut items = Vec::new();
        while let Some(raw) = seq.next_element::<&RawValue>()? {
            items.push(self.read(raw.get()));
        }
        Ok(Value::Array(items))
    }
}

/// A text or a name, with halves of surrogate pairs as WTF-8 has them.
#[derive(Debug)]
struct Text<'p>(Cow<'p, [u8]>);

impl<'p> Deserialize<'p> for Text<'p> {
    fn deserialize<D: Deserializer<'p>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl<'p> Visitor<'p> for Bytes {
            type Value = Text<'p>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_bytes<E: Error>(self, bytes: &'p [u8]) -> Result<Text<'p>, E> {
                Ok(Text(Cow::Borrowed(bytes)))
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Text<'p>, E> {
                Ok(Text(Cow::Owned(bytes.to_vec())))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}
