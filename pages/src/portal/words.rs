//! The words of the portal. Each language is one file; a word that it lacks does not compile.

mod de;
mod en;

use std::time::Duration;

use diesel_outbox::program::TOKEN_WORDS;

use crate::pages::words;

/// Declares the words. `{}` in a word is replaced by a value.
macro_rules! words {
    ($($word:ident)+) => {
        /// The words of one language.
        pub(super) struct Words {
            $(pub(super) $word: &'static str,)+
            /// The texts of failures: in English, and in this language. Empty: English.
            errors: &'static [(&'static str, &'static str)],
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
    code thousands decimal title skip_to_content endpoints deliveries read_only
    add_endpoint no_endpoints we_call_you we_call_you_hint you_fetch you_fetch_hint address position not_fetched all_fetched lag_events last_fetched never
    token make_token token_hint token_once fetch_hint next_hint fetched_hint way
    url description topics state all_topics example
    active failing unread not_verified disabled paused unusable until_time no_success_since not_fetched_since
    why_paused_here why_paused_by_us why_paused_receiver why_paused_breaker
    pause_or_disable pause resume pause_for reason while_paused while_disabled missed_is_kept missed_is_lost
    invalid_duration set_by_us
    waits_key waits_paused waits_by_us waits_receiver waits_breaker waits_disabled waits_not_verified waits_room waits_expired waits_for_us
    send_waiting done_retried
    why_failing why_unread why_disabled_failing why_disabled_gone why_disabled_not_verified why_disabled_here why_disabled_other why_unusable why_not_verified
    change save cancel verify enable disable remove remove_waiting remove_unread remove_sure remove_sure_of_feed rotate rotate_hint secret secret_once old_secrets_until
    send_example example_event send_example_hint test_accepted test_failed status_code took no_response
    again recover since until recover_hint missing_too
    last_day delivered in_feed dead_lettered no_data highest
    filter_hint filter_help filter_as_json filter_changed remove_filter condition condition_field condition_values more_conditions
    is is_not begins_with ends_with is_in_any_case at_least at_most more_than less_than exists is_missing
    help_is help_text help_number help_exists help_lists filter_limits
    name_a_field field_has_fields values_needed one_number lower_and_upper is_not_alone filter_too_large
    filter endpoint topic any search older first_page more no_deliveries incomplete
    message attempts when due_at send_again details
    pending sending retrying dead
    your_endpoint your_token_server the_url the_token_url
    request response headers payload not_kept payload_hidden failed_attempts attempt error enqueued
    back not_found not_found_hint invalid_request choose_topic unknown_topic description_too_long invalid_time too_many invalid_url url_refused
    invalid_value too_often
    unavailable unavailable_hint not_set_up form_expired not_allowed
    link_needed link_needed_hint link_expired link_invalid link_hint
    done_added done_changed done_enabled done_paused done_resumed done_removed done_again done_recovered done_recovering done_verified
}

impl Words {
    /// Why a delivery failed, from the text for customers.
    pub(super) fn failure(&self, english: &str) -> String {
        let known = |text: &str| {
            let mut all = self.errors.iter();
            all.find_map(|(known, own)| Some(own.replace("{}", value(text, known)?)))
        };
        let of_tokens = || {
            let [endpoint, url] = TOKEN_WORDS;
            let of_endpoint = english.replace(endpoint.1, endpoint.0);
            let text = known(&of_endpoint.replace(url.1, url.0))?;
            let text = text.replace(self.your_endpoint, self.your_token_server);
            Some(text.replace(self.the_url, self.the_token_url))
        };
        let text = known(english).or_else(of_tokens);
        text.unwrap_or_else(|| english.to_owned())
    }

    pub(super) fn number(&self, number: u64) -> String {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        words::count(number, false).replace(',', self.thousands)
    }

    pub(super) fn duration(&self, time: Duration) -> String {
        words::duration(time.as_secs_f64()).replace('.', self.decimal)
    }
}

/// What stands for `{}`, if this is the sentence. A sentence without `{}` has an empty value.
fn value<'a>(text: &'a str, sentence: &str) -> Option<&'a str> {
    match sentence.split_once("{}") {
        Some((begin, end)) => text.strip_prefix(begin)?.strip_suffix(end),
        None => (text == sentence).then_some(""),
    }
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
    use diesel_outbox::program::PUBLIC_ERRORS;

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

    /// R60: also what went wrong, about an endpoint and about a token server.
    #[test]
    fn every_error_for_customers_is_translated_with_its_value() {
        let german = Language::German.words();
        for sentence in PUBLIC_ERRORS {
            let text = sentence.replace("{}", "shop.example");
            let own = german.failure(&text);
            assert_ne!(own, text);
            assert_eq!(
                own.contains("shop.example"),
                text.contains("shop.example"),
                "{own}"
            );
            assert_eq!(Language::English.words().failure(&text), text);
        }
        for (english, own) in [
            (
                "your token server did not answer within 15 s",
                "Ihr Token-Server hat nicht innerhalb von 15 s geantwortet",
            ),
            (
                "the token URL leads to no public address",
                "die Token-URL führt zu keiner öffentlichen Adresse",
            ),
            ("unheard of", "unheard of"),
        ] {
            assert_eq!(german.failure(english), own);
        }
    }

    #[test]
    fn numbers_are_written_as_in_the_language() {
        let all = [Language::English, Language::German].map(|one| {
            let words = one.words();
            (
                words.number(1234),
                words.duration(Duration::from_millis(2500)),
            )
        });
        let [english, german] = all;
        assert_eq!(english, ("1,234".to_owned(), "2.5 s".to_owned()));
        assert_eq!(german, ("1.234".to_owned(), "2,5 s".to_owned()));
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
