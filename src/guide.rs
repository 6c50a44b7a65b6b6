//! The guide, which continues where the README ends. Each page is a module without items.
//!
//! The repository has the same pages in `docs/*.md`.

/// Using the outbox in an application: enqueueing, handlers, the relay in your process, tests.
#[doc = include_str!("../docs/application.md")]
pub mod application {}

/// Topics, versions, ordering keys, idempotency keys, transactions, tenants, payloads.
#[doc = include_str!("../docs/keys-and-topics.md")]
pub mod keys_and_topics {}

/// Writing a receiver that handles each message once.
#[doc = include_str!("../docs/receivers.md")]
pub mod receivers {}

/// Webhooks for your own customers: secrets, deliveries, sending again, limits.
#[doc = include_str!("../docs/webhooks.md")]
pub mod webhooks {}

/// Running the relay in the process, as a sidecar, under systemd, or in an empty container.
#[doc = include_str!("../docs/deploying.md")]
pub mod deploying {}

/// Finding and fixing problems: the admin page, health checks, metrics, alerts.
#[doc = include_str!("../docs/operating.md")]
pub mod operating {}

/// A checklist for going live, and a record of one check.
#[doc = include_str!("../docs/readiness.md")]
pub mod readiness {}

/// Scaling: one relay or several, isolation of destinations, several outboxes.
#[doc = include_str!("../docs/scaling.md")]
pub mod scaling {}

/// The limits of one database, what to do first, and when to hand over to another system.
#[doc = include_str!("../docs/beyond-one-postgresql.md")]
pub mod beyond_one_postgresql {}

/// PostgreSQL: server settings, roles, poolers, backups.
#[doc = include_str!("../docs/postgresql.md")]
pub mod postgresql {}

/// Every setting, `outbox.toml`, TLS, and the addresses to which requests may go.
#[doc = include_str!("../docs/settings.md")]
pub mod settings {}

/// Every command of the binary.
#[doc = include_str!("../docs/commands.md")]
pub mod commands {}

/// HTTP requests: headers, signatures, and the effect of each response.
#[doc = include_str!("../docs/requests.md")]
pub mod requests {}

/// Ordering keys: what they guarantee, and what they cost.
#[doc = include_str!("../docs/order.md")]
pub mod order {}

/// The contents of each table, and how the tables are created.
#[doc = include_str!("../docs/tables.md")]
pub mod tables {}

/// Measurements, with the commands that reproduce them.
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}

/// Renaming a topic without losing a message.
#[doc = include_str!("../docs/rename-a-topic.md")]
pub mod rename_a_topic {}

/// Upgrading: versions of the crate, the tables and the events.
#[doc = include_str!("../docs/upgrading.md")]
pub mod upgrading {}

/// Moving here from another outbox.
#[doc = include_str!("../docs/coming-from.md")]
pub mod coming_from {}

/// Other outboxes and queues, and when to use them instead.
#[doc = include_str!("../docs/compared.md")]
pub mod compared {}

/// All that most programs need, on one page.
#[doc = include_str!("../docs/for-agents.md")]
pub mod for_agents {}
