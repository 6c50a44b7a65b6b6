//! The words of the portal. Each language is one file; a word that it lacks does not compile.

mod de;
mod en;

/// Declares the words. `{}` in a word is replaced by a value.
macro_rules! words {
    ($($word:ident)+) => {
        /// The words of one language.
        pub(super) struct Words {
            $(pub(super) $word: &'static str,)+
        }

        #[cfg(test)]
        impl Words {
            fn all(&self) -> Vec<(&'static str, &'static str)> {
                vec![$((stringify!($word), self.$word)),+]
            }
        }
    };
}

words! {
    code title skip_to_content endpoints deliveries read_only
    add_endpoint no_endpoints url description topics state all_topics example
    works failing not_verified disabled no_success_since
    why_failing why_disabled_failing why_disabled_gone why_disabled_here why_disabled_other why_unusable why_not_verified
    change save cancel verify enable disable remove remove_sure rotate rotate_hint secret secret_once old_secrets_until
    send_example example_event send_example_hint test_accepted test_failed status_code took no_response
    recover since until recover_hint missing_too
    last_day delivered dead_lettered no_data highest
    filter endpoint topic any search older first_page no_deliveries incomplete
    message attempts when due_at send_again details
    pending sending retrying dead
    request response headers payload not_kept payload_hidden failed_attempts attempt error enqueued
    back not_found not_found_hint invalid_request choose_topic description_too_long invalid_time too_many invalid_url url_refused
    invalid_value too_often
    unavailable unavailable_hint form_expired not_allowed
    link_needed link_needed_hint link_expired link_invalid link_hint
    done_added done_changed done_enabled done_disabled done_removed done_again done_recovered done_verified
}

/// A language of the portal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Language {
    /// English.
    English,
    /// German.
    German,
}

impl Language {
    /// The first language of an `Accept-Language` header that the portal speaks; otherwise English.
    pub(super) fn accepted(header: &str) -> Self {
        let codes = header.split(',').map(|one| {
            let (range, _) = one.split_once(';').unwrap_or((one, ""));
            let range = range.trim();
            range.split_once('-').map_or(range, |(code, _)| code)
        });
        let known = |code: &str| {
            let mut all = [Self::English, Self::German].into_iter();
            all.find(|one| one.words().code.eq_ignore_ascii_case(code))
        };
        codes.filter_map(known).next().unwrap_or(Self::English)
    }

    pub(super) fn words(self) -> &'static Words {
        match self {
            Self::English => &en::WORDS,
            Self::German => &de::WORDS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R60
    #[test]
    fn every_language_has_every_word_with_its_values() {
        let values = |text: &str| text.matches("{}").count();
        for ((key, english), (_, german)) in en::WORDS.all().into_iter().zip(de::WORDS.all()) {
            assert!(!english.is_empty() && !german.is_empty(), "{key}");
            assert_eq!(values(english), values(german), "{key}");
        }
    }

    #[test]
    fn the_first_known_language_of_a_browser_is_used() {
        for (header, language) in [
            ("", Language::English),
            ("fr, de-CH;q=0.8, en;q=0.5", Language::German),
            ("EN-gb,de", Language::English),
            ("deutsch", Language::English),
        ] {
            assert_eq!(Language::accepted(header), language, "{header}");
        }
    }
}
