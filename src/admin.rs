//! Functions for operators: migrate, inspect, retry, cancel, settle, requeue, discard, replay, pause, expunge, forget. The commands of
//! the binary call these functions.
//!
//! Each function takes the caller's connection and the name of an outbox. Each function commits, unless the caller has
//! a transaction open. For example, after an outage of a receiver:
//!
//! ```no_run
//! use diesel::{Connection, PgConnection};
//! use diesel_outbox::admin::{self, DeadFilter, Pausable};
//! use diesel_outbox::{OutboxName, ReasonCode};
//!
//! let outbox: OutboxName = "outbox".parse()?;
//! let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//!
//! // Requeue the messages that were dead-lettered because of 5xx responses …
//! let filter = DeadFilter::default()
//!     .topic("order.paid".to_owned())
//!     .reason(ReasonCode::ServerError);
//! let sequences = admin::matching_dead_letters(&mut conn, &outbox, &filter)?;
//! let note = admin::Note::new("alice", "the receiver is fixed");
//! let requeued = admin::requeue(&mut conn, &outbox, &sequences, &note)?;
//! println!("{requeued} of {} dead letters are due again", sequences.len());
//!
//! // … and resume the destination.
//! admin::resume(&mut conn, &outbox, Pausable::Destination, "billing")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bulk;
pub(crate) mod dead_letters;
pub(crate) mod depths;
pub(crate) mod diagnose;
pub(crate) mod due;
mod expunge;
mod forget;
pub(crate) mod keys;
pub(crate) mod messages;
pub(crate) mod migrations;
pub(crate) mod overview;
mod pauses;
pub(crate) mod replay;
pub(crate) mod server;
pub(crate) mod tail;
pub(crate) mod topics;
pub(crate) mod waiting;

pub(crate) use self::bulk::change_all;
pub use self::bulk::{Bulk, cancel_all, retry_all};
pub use self::dead_letters::{discard, matching_dead_letters, requeue};
pub use self::depths::depths;
pub use self::expunge::{expunge, expunge_all};
pub use self::forget::{Forgotten, forget};
pub use self::migrations::{check_schema, migration_sql};
pub use self::pauses::{Pause, pause, pauses, resume};
pub use self::replay::{ReplayRun, replay};
pub use self::topics::declare_topics;
pub use self::waiting::{Note, Verdict, cancel, reschedule, retry, settle, wait_reasons};
pub use crate::store::endpoints::EndpointCounts;
pub use crate::store::operate::dead::DeadFilter;
pub use crate::store::operate::depths::{DeadDepth, Depths, LaneDepth};
pub use crate::store::operate::expunge::{Expunged, Subject};
pub use crate::store::operate::messages::LetterId;
pub use crate::store::operate::missed::Bulked;
pub use crate::store::operate::replay::{ReplayFilter, ReplayIds};
pub use crate::store::operate::waiting::WaitingFilter;
pub use crate::store::operate::why::{Blocker, WaitReason};
pub use crate::store::place::Place;
pub use crate::store::relay::lease::SilentRelay;
pub use crate::store::relay::pause::Pausable;
pub use crate::store::relay::served::Unserved;
