//! Functions for operators: migrate, inspect, retry, cancel, settle, requeue, discard, replay, pause, expunge, forget. The commands of
//! the binary call these functions.
//!
//! Each function takes the caller's connection and the name of an outbox. Each function commits, unless the caller has
//! a transaction open. For example, after an outage of a receiver:
//!
//! ```no_run
//! use diesel::{Connection, PgConnection};
//! use diesel_outbox::admin::{self, Pausable, Selection};
//! use diesel_outbox::{OutboxName, ReasonCode};
//!
//! let outbox: OutboxName = "outbox".parse()?;
//! let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//!
//! // Requeue the messages that were dead-lettered because of 5xx responses …
//! let letters = Selection::default()
//!     .topic("order.paid".to_owned())
//!     .reason(ReasonCode::ServerError);
//! let sequences = admin::matching_dead_letters(&mut conn, &outbox, &letters)?;
//! let note = admin::Note::new("alice", "the receiver is fixed");
//! let requeued = admin::requeue(&mut conn, &outbox, &sequences, &note)?;
//! println!("{requeued} of {} dead letters are due again", sequences.len());
//!
//! // … and resume the destination.
//! admin::resume(&mut conn, &outbox, Pausable::Destination, "billing")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use crate::doctor::migrations::{check_schema, migration_sql};
pub use crate::endpoints::sql::missed::Bulked;
pub use crate::endpoints::sql::rows::EndpointCounts;
pub use crate::endpoints::sql::served::Unserved;
pub use crate::endpoints::sql::silent::SilentRelay;
pub use crate::engine::send::sql::pause::Pausable;
pub use crate::operate::bulk::{Bulk, cancel_all, retry_all};
pub use crate::operate::dead_letters::{discard, matching_dead_letters, requeue};
pub use crate::operate::depths::depths;
pub use crate::operate::expunge::{expunge, expunge_all};
pub use crate::operate::forget::{Forgotten, forget};
pub use crate::operate::pauses::{Pause, pause, pauses, resume};
pub use crate::operate::replay::{ReplayRun, replay};
pub use crate::operate::sql::depths::{DeadDepth, Depths, FeedLag, LaneDepth};
pub use crate::operate::sql::expunge::{Expunged, Subject};
pub use crate::operate::sql::messages::LetterId;
pub use crate::operate::sql::place::Place;
pub use crate::operate::sql::replay::ReplayIds;
pub use crate::operate::sql::selection::Selection;
pub use crate::operate::sql::why::{Blocker, WaitReason};
pub use crate::operate::topics::declare_topics;
pub use crate::operate::waiting::{Note, Verdict, cancel, reschedule, retry, settle, wait_reasons};
