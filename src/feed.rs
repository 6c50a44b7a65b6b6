//! Feeds: destinations that are read instead of sent to.
//!
//! A feed is an endpoint without a URL ([`Endpoint::feed`](crate::endpoints::Endpoint::feed)), or a destination of the
//! settings with `feed = true`. Its messages become events, at positions without gaps and in the order of commits. A
//! consumer reads them over HTTP from a [`Cursor`], as often as it likes, and keeps the cursor itself: for consumers
//! without a public address, to catch up after an outage, and to check that nothing is missing. See the chapter
//! [feeds](https://github.com/diesel-outbox/diesel-outbox/blob/main/docs/feeds.md) of the guide.
//!
//! A consumer in Rust calls [`consume`], which keeps the cursor in the transaction of the work, or reads pages with a
//! [`Reader`].

#[cfg(feature = "http")]
mod consume;
pub(crate) mod cursor;
#[cfg(feature = "http")]
mod document;
mod event;
pub(crate) mod feeds;
mod keeping;
pub(crate) mod page;
#[cfg(feature = "http")]
mod reader;
pub(crate) mod sql;

#[cfg(feature = "http")]
pub use self::consume::{ConsumeError, consume, consume_pages, set_position};
pub use self::cursor::{BadCursor, Cursor};
pub(crate) use self::keeping::chore;
pub use self::page::{After, BadAfter};
#[cfg(feature = "http")]
pub use self::reader::{Page, ReadError, Reader};
