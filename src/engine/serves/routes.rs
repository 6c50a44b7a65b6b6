//! Routing: which message goes to which destinations.

use std::collections::{BTreeSet, HashMap};

use crate::config_error::edits;

mod refuses;
mod serves;

pub(crate) use self::refuses::Refuses;
pub(crate) use self::serves::Serves;

/// Topic patterns and their destinations, most specific first: an exact topic, then the longest
/// prefix before the first `*`, then the longest pattern.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Routes {
    patterns: Vec<(String, Vec<usize>)>,
    by_name: HashMap<String, usize>,
    /// The names, by number.
    names: Vec<String>,
    /// The topics of each group of handlers, by the group's number.
    handled: HashMap<usize, Vec<String>>,
    /// The destination of all other messages.
    rest: Option<usize>,
    /// Patterns of the only topics that the relay takes; empty: all topics.
    only: Vec<String>,
}

/// Where a message goes. Destinations have numbers: first those with a URL, in the order of the settings, then groups of
/// handlers, last the application's own dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way<'a> {
    /// To one destination.
    To(usize),
    /// To several destinations, as one message for each (a fan-out).
    Split(&'a [usize]),
    /// No route serves the topic, or the route leads to a group without a handler for the topic.
    NoRoute,
    /// The message names a destination that does not exist.
    UnknownDestination,
    /// The relay does not take messages of this topic.
    NotTaken,
}

impl Routes {
    /// The routes of a relay, from the description in its lease.
    pub(crate) fn of(serves: Serves) -> Self {
        let names = serves.destinations.iter();
        let names = names.chain(serves.handlers.iter().map(|(name, _)| name));
        let names: Vec<String> = names.cloned().collect();
        let by_name: HashMap<String, usize> = names.iter().cloned().zip(0..).collect();
        let numbered = serves.handlers.into_iter();
        let handled = numbered.filter_map(|(name, topics)| Some((*by_name.get(&name)?, topics)));
        let handled: HashMap<usize, Vec<String>> = handled.collect();
        let patterns = serves.routes.into_iter().flat_map(|(pattern, to)| {
            let numbers = to.iter().filter_map(|name| by_name.get(name));
            by_topic(pattern, numbers.copied().collect(), &handled)
        });
        Self {
            patterns: patterns.collect(),
            handled,
            rest: serves.rest.then_some(by_name.len()),
            by_name,
            names,
            only: serves.only,
        }
    }

    /// Whether a configured destination has this name.
    pub(crate) fn has(&self, destination: &str) -> bool {
        self.by_name.contains_key(destination)
    }

    /// The names of the configured destinations and of the groups of handlers.
    pub(crate) fn all_names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Where a message of this topic goes: to the destination that the message names or, if that is
    /// empty, to the destinations of the most specific pattern.
    pub(crate) fn find(&self, topic: &str, destination: &str) -> Way<'_> {
        if !self.takes(topic) {
            return Way::NotTaken;
        }
        let (numbers, otherwise) = if destination.is_empty() {
            let patterns = &mut self.patterns.iter();
            let found = patterns.find(|(pattern, _)| matches(pattern, topic));
            (found.map(|(_, to)| to.as_slice()), Way::NoRoute)
        } else {
            let number = self.by_name.get(destination);
            (number.map(std::slice::from_ref), Way::UnknownDestination)
        };
        match numbers {
            Some([number]) if is_handled(&self.handled, *number, topic) => Way::To(*number),
            Some([_]) => Way::NoRoute,
            Some([]) | None => self.rest.map_or(otherwise, Way::To),
            Some(numbers) => Way::Split(numbers),
        }
    }

    /// Whether the relay takes messages of this topic.
    pub(crate) fn takes(&self, topic: &str) -> bool {
        self.only.is_empty() || matches_any(&self.only, topic)
    }

    /// Whether a message of this topic has a destination here. `destination`: the name in the message, or empty.
    pub(crate) fn serve(&self, topic: &str, destination: &str) -> bool {
        matches!(self.find(topic, destination), Way::To(_) | Way::Split(_))
    }

    /// The destinations of messages that have this topic and name no destination.
    pub(crate) fn names(&self, topic: &str) -> Option<Vec<&str>> {
        match self.find(topic, "") {
            Way::To(number) => Some(self.names_of(&[number]).collect()),
            Way::Split(numbers) => Some(self.names_of(numbers).collect()),
            Way::NoRoute | Way::UnknownDestination | Way::NotTaken => None,
        }
    }

    /// The names of the destinations with these numbers. The application's own dispatcher has none.
    pub(crate) fn names_of(&self, numbers: &[usize]) -> impl Iterator<Item = &str> {
        let names = numbers.iter().filter_map(|number| self.names.get(*number));
        names.map(String::as_str)
    }
}

/// Whether the destination serves the topic. Only groups of handlers are limited to some topics.
fn is_handled(handled: &HashMap<usize, Vec<String>>, number: usize, topic: &str) -> bool {
    let topics = handled.get(&number);
    topics.is_none_or(|topics| topics.iter().any(|one| one == topic))
}

/// A route to several destinations, of which some are groups of handlers: its topics that have handlers go to the groups
/// as well, and all others to the other destinations alone.
fn by_topic(
    pattern: String,
    to: Vec<usize>,
    handled: &HashMap<usize, Vec<String>>,
) -> Vec<(String, Vec<usize>)> {
    let others: Vec<usize> = to
        .iter()
        .copied()
        .filter(|to| !handled.contains_key(to))
        .collect();
    if to.len() < 2 || others.len() == to.len() {
        return vec![(pattern, to)];
    }
    let topics = to.iter().filter_map(|number| handled.get(number)).flatten();
    let topics: BTreeSet<&String> = topics.filter(|topic| matches(&pattern, topic)).collect();
    let of_topic = |topic: &String| {
        let to = to.iter().copied();
        let to = to.filter(|number| is_handled(handled, *number, topic));
        (topic.clone(), to.collect())
    };
    let mut routes: Vec<_> = topics.into_iter().map(of_topic).collect();
    // A route that leads only to groups serves no other topic.
    let rest = if others.is_empty() {
        vec![to[0]]
    } else {
        others
    };
    routes.push((pattern, rest));
    routes
}

/// Whether a topic matches one of these patterns, as in routes.
pub(crate) fn matches_any(patterns: &[String], topic: &str) -> bool {
    patterns.iter().any(|pattern| matches(pattern, topic))
}

/// The pattern that the writer of a topic probably meant.
pub(crate) fn nearest_pattern<'a>(
    topic: &str,
    patterns: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    patterns
        .map(|pattern| (edits(topic, pattern), pattern))
        .filter(|(edits, pattern)| {
            let letters = pattern.bytes().filter(|&b| b != b'*').count();
            *edits <= (letters / 2).min(3)
        })
        .min()
        .map(|(_, pattern)| pattern)
}

/// `*` matches any characters, or none.
fn matches(pattern: &str, topic: &str) -> bool {
    // Each message is compared with many patterns: most of them differ in their first bytes.
    let mut bytes = pattern.bytes().zip(topic.bytes());
    let decides = bytes.find(|(one, other)| *one == b'*' || one != other);
    if decides.is_some_and(|(one, _)| one != b'*') {
        return false;
    }
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == topic;
    };
    let Some(mut left) = topic.strip_prefix(first) else {
        return false;
    };
    let Some((middle, last)) = rest.rsplit_once('*') else {
        return left.ends_with(rest);
    };
    // The leftmost match of each middle part leaves the most text for the parts after it.
    for part in middle.split('*') {
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, proptest};

    use super::*;
    use crate::config::{Config, Destination, Route};

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, topic, expected) in [
            ("order.*", "order.paid", true),
            ("order.*", "order.", true),
            ("order.*", "order", false),
            ("*", "anything", true),
            ("*.paid", "order.paid", true),
            ("*.paid", "order.paid.twice", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c", false),
            ("a*a", "a", false),
            ("order.paid", "order.paid", true),
            ("order.paid", "order.paid.twice", false),
            ("order.paid", "order", false),
            ("a*b", "a*xb", true),
            ("order.paid", "order.paid2", false),
        ] {
            assert_eq!(matches(pattern, topic), expected, "{pattern} {topic}");
        }
    }

    #[test]
    fn the_nearest_pattern_of_a_mistyped_topic_is_found() {
        let patterns = ["*", "invoice.*", "order.*", "member.joined"];
        for (topic, expected) in [
            ("odrer.paid", Some("order.*")),
            ("oder.paid", Some("order.*")),
            ("invioce.sent", Some("invoice.*")),
            ("member.joint", Some("member.joined")),
            ("warehouse.empty", None),
        ] {
            let found = nearest_pattern(topic, patterns.into_iter().skip(1));
            assert_eq!(found, expected, "{topic}");
        }
    }

    #[test]
    fn the_most_particular_pattern_wins() {
        let mut config = Config::default();
        let patterns = ["*", "order.*", "order.paid", "order.p*", "*.paid"];
        for (number, pattern) in patterns.into_iter().enumerate() {
            let name = format!("d{number}");
            config
                .destinations
                .push(Destination::new(&name, "http://a").expect("a URL"));
            config.routes.push(Route::new(pattern, name));
        }
        let routes = Routes::new(&config);
        for (topic, expected) in [
            ("order.paid", 2),
            ("order.placed", 3),
            ("order.shipped", 1),
            ("invoice.paid", 4),
            ("invoice.sent", 0),
        ] {
            assert_eq!(routes.find(topic, ""), Way::To(expected), "{topic}");
        }
        assert_eq!(routes.find("order.paid", "d0"), Way::To(0));
        assert_eq!(routes.find("order.paid", "d9"), Way::UnknownDestination);
    }

    #[test]
    fn a_route_to_several_destinations_splits() {
        let mut config = Config::default();
        for name in ["a", "b"] {
            config
                .destinations
                .push(Destination::new(name, "http://a").expect("a URL"));
        }
        config.routes.push(Route::to_each("order.*", ["b", "a"]));
        let routes = Routes::new(&config);
        assert_eq!(routes.find("order.paid", ""), Way::Split(&[1, 0]));
        assert_eq!(routes.find("invoice.paid", ""), Way::NoRoute);
        config.url = Some("http://c".parse().expect("a URL"));
        assert_eq!(
            Routes::new(&config).find("invoice.paid", ""),
            Way::To(2),
            "OUTBOX_URL serves the rest"
        );
    }

    /// R16, R44.
    #[test]
    fn a_group_of_handlers_serves_its_own_topics_only() {
        let mut config = Config::default();
        config.in_process.push(crate::config::InProcess {
            name: "mailer".to_owned(),
            topics: vec!["order.paid".to_owned()],
            ..crate::config::InProcess::default()
        });
        config.routes.push(Route::new("order.*", "mailer"));
        let routes = Routes::new(&config);
        for destination in ["", "mailer"] {
            assert_eq!(routes.find("order.paid", destination), Way::To(0));
            assert_eq!(routes.find("order.sent", destination), Way::NoRoute);
        }
        config.takes_rest = true;
        let routes = Routes::new(&config);
        assert_eq!(routes.find("invoice.sent", ""), Way::To(1));
        assert_eq!(routes.find("order.sent", "no such"), Way::To(1));
        assert_eq!(routes.find("order.sent", "mailer"), Way::NoRoute);
    }

    /// R44: of a route to a destination and to handlers, topics without a handler go to the destination alone.
    #[test]
    fn a_route_to_handlers_and_a_destination_serves_every_topic() {
        let mut config = Config::default();
        let billing = Destination::new("billing", "http://a").expect("a URL");
        config.destinations.push(billing);
        config.in_process.push(crate::config::InProcess {
            name: "handlers".to_owned(),
            topics: vec!["order.paid".to_owned(), "member.left".to_owned()],
            ..crate::config::InProcess::default()
        });
        let both = Route::to_each("order.*", ["billing", "handlers"]);
        config.routes.push(both);
        let routes = Routes::new(&config);
        assert_eq!(routes.find("order.paid", ""), Way::Split(&[0, 1]));
        assert_eq!(routes.find("order.sent", ""), Way::To(0));
        assert_eq!(routes.find("member.left", ""), Way::NoRoute);
        assert_eq!(routes.names("order.sent"), Some(vec!["billing"]));
        config.routes = vec![Route::to_each("order.*", ["handlers", "handlers"])];
        let routes = Routes::new(&config);
        assert_eq!(routes.find("order.sent", ""), Way::NoRoute);
    }

    /// R40.
    #[test]
    fn a_relay_for_some_topics_takes_no_others() {
        let mut config = Config::default();
        config.set("OUTBOX_URL", "http://a.example").expect("a URL");
        config.only = vec!["order.*".to_owned(), "mail".to_owned()];
        let routes = Routes::new(&config);
        for (topic, destination, expected) in [
            ("order.paid", "", Way::To(0)),
            ("mail", "default", Way::To(0)),
            ("mail.sent", "default", Way::NotTaken),
            ("mail", "no such", Way::UnknownDestination),
        ] {
            assert_eq!(routes.find(topic, destination), expected, "{topic}");
            assert_eq!(
                routes.serve(topic, destination),
                matches!(expected, Way::To(_))
            );
        }
    }

    proptest! {
        #[test]
        fn any_pattern_and_topic_have_an_answer(pattern in ".{0,40}", topic in ".{0,40}") {
            matches(&pattern, &topic);
        }

        #[test]
        fn a_pattern_made_from_a_topic_matches_it(topic in "[a-c.ä]{1,12}", cuts in proptest::collection::vec(0_usize..12, 1..4)) {
            let mut pattern: Vec<char> = topic.chars().collect();
            for cut in cuts {
                let at = cut % pattern.len();
                pattern[at] = '*';
            }
            let pattern: String = pattern.into_iter().collect();
            prop_assert!(matches(&pattern, &topic), "{} {}", pattern, topic);
        }
    }
}
