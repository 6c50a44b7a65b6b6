//! Routes from topics to destinations.

/// The name of the destination that `OUTBOX_URL` creates.
pub(crate) const DEFAULT_DESTINATION: &str = "default";

/// A route: messages of matching topics go to these destinations. `*` matches any characters: `order.*`, `*`. If
/// several routes match a topic, the most specific pattern wins.
///
/// ```
/// use diesel_outbox::{Destination, Route};
/// use diesel_outbox::config::Config;
///
/// let mut config = Config::default();
/// config.routes = vec![
///     Route::new("*", "archive"),
///     Route::to_each("order.*", ["billing", "archive"]),
/// ];
/// config.destinations = vec![
///     Destination::new("archive", "https://archive.example/events")?,
///     Destination::new("billing", "https://billing.example/events")?,
/// ];
/// config.validate()?;
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Route {
    /// A topic or a pattern.
    pub topic: String,
    /// The names of the destinations. Each of several destinations gets a message of its own, with its own
    /// attempts and its own row in the ledger.
    pub to: Vec<String>,
}

impl Route {
    /// A route from topics that match `topic` to the destination `to`.
    pub fn new(topic: impl Into<String>, to: impl Into<String>) -> Self {
        Self::to_each(topic, [to])
    }

    /// A route from topics that match `topic` to each of the destinations `to`.
    pub fn to_each<T: Into<String>>(
        topic: impl Into<String>,
        to: impl IntoIterator<Item = T>,
    ) -> Self {
        Self {
            topic: topic.into(),
            to: to.into_iter().map(Into::into).collect(),
        }
    }
}
