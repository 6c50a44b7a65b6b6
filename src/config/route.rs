//! Which topic goes where.

/// Which topics go to which destinations. `*` stands for any characters: `order.*`, `*`. Of several that
/// match a topic, the most particular one counts.
///
/// ```
/// use diesel_outbox::{Config, Route};
///
/// let mut config = Config::default();
/// config.routes = vec![
///     Route::new("*", "archive"),
///     Route::to_each("order.*", ["billing", "archive"]),
/// ];
/// let first = &config.all_routes()[0];
/// assert_eq!(first.topic, "order.*");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Route {
    /// A topic or a pattern.
    pub topic: String,
    /// Names of destinations. With several of them each gets a message of its own, with its own
    /// attempts and its own row in the ledger.
    pub to: Vec<String>,
}

impl Route {
    /// Topics that match `topic` go to the destination `to`.
    pub fn new(topic: impl Into<String>, to: impl Into<String>) -> Self {
        Self::to_each(topic, [to])
    }

    /// Topics that match `topic` go to each of these destinations.
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
