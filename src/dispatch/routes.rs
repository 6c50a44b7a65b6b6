//! Which topic goes where.

/// Patterns and what they lead to, the most particular first: an exact topic, then the longest
/// text before the first `*`, then the longest pattern.
#[derive(Debug)]
pub(super) struct Routes<T> {
    patterns: Vec<(String, T)>,
}

impl<T> Routes<T> {
    pub(super) fn new(mut patterns: Vec<(String, T)>) -> Self {
        patterns.sort_by_key(|(pattern, _)| {
            let prefix = pattern.split('*').next().unwrap_or_default().len();
            let particularity = (!pattern.contains('*'), prefix, pattern.len());
            std::cmp::Reverse(particularity)
        });
        Self { patterns }
    }

    /// The target of the most particular pattern that matches.
    pub(super) fn find(&self, topic: &str) -> Option<&T> {
        self.patterns
            .iter()
            .find(|(pattern, _)| matches(pattern, topic))
            .map(|(_, target)| target)
    }
}

/// `*` stands for any characters, or none.
fn matches(pattern: &str, topic: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == topic;
    };
    let Some(mut left) = topic.strip_prefix(first) else {
        return false;
    };
    let mut middle: Vec<&str> = rest.split('*').collect();
    let last = middle.pop().unwrap_or_default();
    // The leftmost place of each middle part leaves the most for the ones after it.
    for part in middle {
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
            ("order.paid", "order.paid2", false),
        ] {
            assert_eq!(matches(pattern, topic), expected, "{pattern} {topic}");
        }
    }

    #[test]
    fn the_most_particular_pattern_wins() {
        let routes = Routes::new(
            ["*", "order.*", "order.paid", "order.p*", "*.paid"]
                .map(|pattern| (pattern.to_owned(), pattern))
                .to_vec(),
        );
        assert_eq!(routes.find("order.paid"), Some(&"order.paid"));
        assert_eq!(routes.find("order.placed"), Some(&"order.p*"));
        assert_eq!(routes.find("order.shipped"), Some(&"order.*"));
        assert_eq!(routes.find("invoice.paid"), Some(&"*.paid"));
        assert_eq!(routes.find("invoice.sent"), Some(&"*"));
    }

    proptest! {
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
