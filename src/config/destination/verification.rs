//! How an endpoint shows that it wants messages.

use crate::words::words;

words! {
    setting:
    /// How an endpoint shows that it wants messages, before the first is sent.
    ///
    /// Until then, messages wait. With a variant that skips, the destination gets no messages until then, as if it were
    /// disabled.
    ///
    /// ```
    /// use diesel_outbox::config::Verification;
    /// use diesel_outbox::endpoints::Endpoint;
    ///
    /// let mut hook = Endpoint::new("acme", "https://acme.example/hooks");
    /// hook.verification = Verification::Challenge;
    /// assert!(!hook.is_verified());
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    #[non_exhaustive]
    pub enum Verification {
        /// It need not.
        #[default]
        None = "none",
        /// The response to a signed event `outbox.verification` repeats the event's `challenge`.
        Challenge = "challenge",
        /// [`Challenge`](Self::Challenge), and the destination gets no messages until then.
        ChallengeSkip = "challenge:skip",
        /// The response to an OPTIONS request allows the origin of the requests, as in CloudEvents' specification of web
        /// hooks.
        CloudEvents = "cloudevents",
        /// [`CloudEvents`](Self::CloudEvents), and the destination gets no messages until then.
        CloudEventsSkip = "cloudevents:skip",
    }
}

impl std::str::FromStr for Verification {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        Self::read(word)
    }
}

impl Verification {
    /// Whether the endpoint takes part in the handshake of CloudEvents. Each request then names its origin.
    pub(crate) fn is_by_cloudevents(self) -> bool {
        matches!(self, Self::CloudEvents | Self::CloudEventsSkip)
    }

    /// Whether the destination gets no messages until it is verified.
    pub(crate) fn skips(self) -> bool {
        matches!(self, Self::ChallengeSkip | Self::CloudEventsSkip)
    }
}
