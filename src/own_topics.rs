//! Topics of the events about the outbox itself.

/// An endpoint fails.
pub(crate) const FAILING: &str = "outbox.endpoint.failing";
/// A feed has events, and nobody reads it.
pub(crate) const UNREAD: &str = "outbox.endpoint.unread";
/// A failing destination works again, or an unread feed is read.
pub(crate) const RECOVERED: &str = "outbox.endpoint.recovered";
/// A relay has paused a destination until it is resumed.
pub(crate) const PAUSED: &str = "outbox.endpoint.paused";
/// A relay has disabled an endpoint.
pub(crate) const DISABLED: &str = "outbox.endpoint.disabled";
/// Messages to a destination were dead-lettered within a minute.
pub(crate) const DEAD: &str = "outbox.messages.dead";
/// A circuit breaker has opened.
pub(crate) const OPENED: &str = "outbox.breaker.opened";

/// Whether messages of this topic are events about the outbox itself.
pub(crate) fn is_own(topic: &str) -> bool {
    matches!(
        topic,
        FAILING | UNREAD | RECOVERED | PAUSED | DISABLED | DEAD | OPENED
    )
}
