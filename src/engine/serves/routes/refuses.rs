//! The members that a relay does not serve because of its own settings. The relay publishes them in its
//! lease, for operators and the other relays.

use std::collections::{BTreeMap, BTreeSet};

use super::serves::ascii;

/// The names of the refused destinations, by the reason of the refusal.
// Why: docs/decisions.md#refusals
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Refuses(BTreeMap<String, BTreeSet<String>>);

impl Refuses {
    pub(crate) fn add(&mut self, name: &str, why: &str) {
        let names = self.0.entry(why.to_owned()).or_default();
        names.insert(name.to_owned());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn count(&self) -> usize {
        self.0.values().map(BTreeSet::len).sum()
    }

    /// Why the relay refuses the destination; `None`: the relay serves it.
    pub(crate) fn why(&self, name: &str) -> Option<&str> {
        let mut all = self.0.iter();
        all.find(|(_, names)| names.contains(name))
            .map(|(why, _)| why.as_str())
    }

    /// Each refused destination, with the reason.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .flat_map(|(why, names)| names.iter().map(move |name| (name.as_str(), why.as_str())))
    }

    /// One of the refused destinations, with the reason, for a sentence about all of them.
    pub(crate) fn first(&self) -> Option<(&str, &str)> {
        self.each().next()
    }

    /// JSON in ASCII, which a database with any encoding can store. `None`: the relay refuses none.
    pub(crate) fn to_json(&self) -> Option<String> {
        (!self.is_empty()).then(|| ascii(&serde_json::json!(self.0).to_string()))
    }

    /// A later version may have written this JSON in another format: then nothing is known.
    pub(crate) fn from_json(json: Option<&str>) -> Self {
        let found = json.and_then(|json| serde_json::from_str(json).ok());
        Self(found.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusals_of_a_relay_are_read_back() {
        let mut refuses = Refuses::default();
        assert_eq!(refuses.to_json(), None);
        for (name, why) in [("приём", "no key"), ("b", "no key"), ("a", "not https")] {
            refuses.add(name, why);
        }
        let json = refuses.to_json().expect("three");
        assert!(json.is_ascii(), "{json}");
        assert_eq!(Refuses::from_json(Some(&json)), refuses);
        assert_eq!(
            (refuses.count(), refuses.first()),
            (3, Some(("b", "no key")))
        );
        assert_eq!(refuses.why("a"), Some("not https"));
        assert_eq!(refuses.why("c"), None);
        assert!(Refuses::from_json(Some("[]")).is_empty());
    }
}
