//! The guide: one page for each question that comes after the README. It has no items.
//!
//! The same pages are in the repository, as `docs/*.md`.

/// Enqueueing, handlers, the relay in your process, tests.
#[doc = include_str!("../docs/application.md")]
pub mod application {}

/// Topics, versions, ordering keys, idempotency keys, transactions, tenants, payloads.
#[doc = include_str!("../docs/keys-and-topics.md")]
pub mod keys_and_topics {}

/// How a receiver handles each message once.
#[doc = include_str!("../docs/receivers.md")]
pub mod receivers {}

/// Your customers register URLs: secrets, deliveries, sending again, limits.
#[doc = include_str!("../docs/webhooks.md")]
pub mod webhooks {}

/// In the process, as a sidecar, by systemd, in an empty container.
#[doc = include_str!("../docs/deploying.md")]
pub mod deploying {}

/// Whether messages flow, why not, and what to do: the admin page, health, metrics, alerts.
#[doc = include_str!("../docs/operating.md")]
pub mod operating {}

/// What to check before an outbox goes live, and a record of such a check.
#[doc = include_str!("../docs/readiness.md")]
pub mod readiness {}

/// One relay or several, destinations beside each other, several outboxes.
#[doc = include_str!("../docs/scaling.md")]
pub mod scaling {}

/// Settings of the server, roles, poolers, backups.
#[doc = include_str!("../docs/postgresql.md")]
pub mod postgresql {}

/// Every setting, `outbox.toml`, TLS, and where requests may go.
#[doc = include_str!("../docs/settings.md")]
pub mod settings {}

/// Every command of the binary.
#[doc = include_str!("../docs/commands.md")]
pub mod commands {}

/// Headers, signatures, and what each answer causes.
#[doc = include_str!("../docs/requests.md")]
pub mod requests {}

/// What an ordering key promises, and what it costs.
#[doc = include_str!("../docs/order.md")]
pub mod order {}

/// What each table holds, and who creates it.
#[doc = include_str!("../docs/tables.md")]
pub mod tables {}

/// Numbers, with the commands that give them.
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}

/// Versions of the crate, of the tables, of events.
#[doc = include_str!("../docs/upgrading.md")]
pub mod upgrading {}

/// For people who have another outbox, and want to move.
#[doc = include_str!("../docs/coming-from.md")]
pub mod coming_from {}

/// Other outboxes and queues, and when to take them instead.
#[doc = include_str!("../docs/compared.md")]
pub mod compared {}
