//! The guide, which continues where the README ends. Each page is a module without items.
//!
//! The repository has the same pages in `docs/*.md`.

/// Using the outbox in an application: enqueueing, handlers, the relay in your process, tests.
#[doc = include_str!("../docs/application.md")]
pub mod application {}

/// Topics, versions, ordering keys and what they guarantee, idempotency keys, transactions, tenants, payloads.
#[doc = include_str!("../docs/keys-and-topics.md")]
pub mod keys_and_topics {}

/// Writing a receiver that handles each message once.
#[doc = include_str!("../docs/receivers.md")]
pub mod receivers {}

/// Webhooks for your own customers: endpoints, filters, deliveries, sending again, limits.
#[doc = include_str!("../docs/webhooks.md")]
pub mod webhooks {}

/// Pages and JSON on which your customers manage their endpoints.
#[doc = include_str!("../docs/portal.md")]
pub mod portal {}

/// Verification of endpoints, signatures, secrets, authentication, client certificates.
#[doc = include_str!("../docs/webhook-signatures.md")]
pub mod webhook_signatures {}

/// Endpoints that fail, are disabled, paused or slow; recovering a missed day.
#[doc = include_str!("../docs/failing-endpoints.md")]
pub mod failing_endpoints {}

/// Feeds: destinations that consumers read.
#[doc = include_str!("../docs/feeds.md")]
pub mod feeds {}

/// Running the relay in the process, as a sidecar, under systemd, or in an empty container.
#[doc = include_str!("../docs/deploying.md")]
pub mod deploying {}

/// Whether messages are being delivered: status, health checks, metrics, own events, the log.
#[doc = include_str!("../docs/watch.md")]
pub mod watch {}

/// What to do about each alert and each problem.
#[doc = include_str!("../docs/problems.md")]
pub mod problems {}

/// A destination that fails, hangs or is too slow.
#[doc = include_str!("../docs/destination-down.md")]
pub mod destination_down {}

/// Finding a message: what became of it, what was sent, why it waits.
#[doc = include_str!("../docs/find-a-message.md")]
pub mod find_a_message {}

/// Retrying, requeueing, cancelling, settling and replaying messages: one, or many at once.
#[doc = include_str!("../docs/change-messages.md")]
pub mod change_messages {}

/// Deleting the data of a customer, of a person, or of one message.
#[doc = include_str!("../docs/delete-data.md")]
pub mod delete_data {}

/// What `diesel-outbox check` examines.
#[doc = include_str!("../docs/doctor.md")]
pub mod doctor {}

/// The admin page: access, settings, and serving it inside your application.
#[doc = include_str!("../docs/admin-page.md")]
pub mod admin_page {}

/// JSON for programs that do what operators do.
#[doc = include_str!("../docs/json-for-programs.md")]
pub mod json_for_programs {}

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

/// Other outboxes and queues: when to use them instead, and how to move here from them.
#[doc = include_str!("../docs/compared.md")]
pub mod compared {}

/// All that most programs need, on one page.
#[doc = include_str!("../docs/for-agents.md")]
pub mod for_agents {}
