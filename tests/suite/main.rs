//! Tests against a real PostgreSQL and real sockets. Each module is a part of the contract.
//!
//! A line such as `R6` above a test names the requirement of `tests/requirements.md` that the test shows,
//! `G4` the promise. The scenarios W-101 to W-105 and T-1 to T-7 are the names of tests in `acceptance`.

#[path = "../page.rs"]
mod page;
#[path = "../support.rs"]
mod support;

mod acceptance;
mod admin_access;
mod admin_pages;
mod admin_requests;
mod auth;
mod bulk;
mod bulkheads;
mod bursts;
mod catalogue;
mod commands;
mod dead_letters;
mod deliveries;
mod deploy;
mod depths;
mod destinations;
mod doctor;
mod edges;
mod egress;
mod enqueue;
mod events;
mod exact;
mod failover;
mod fan_out;
mod filters;
mod forget;
mod fresh;
mod guide;
mod handle;
mod handlers;
mod health;
mod history;
mod hostile;
mod in_transaction;
mod inbox;
mod insert;
mod key_run;
mod lab;
mod listen;
mod logged;
mod managed;
mod many;
mod messages;
mod metrics;
mod mistakes;
mod no_route;
mod no_subscriber;
mod odd_rows;
mod operators;
mod ordering;
mod own_events;
mod own_migrations;
mod pages;
mod pause_commands;
mod policies;
mod pooler;
mod prometheus;
mod proxy;
mod quiet;
mod receivers;
mod refusals;
mod registered;
mod reload;
mod replay;
mod restored;
mod retention;
mod roles;
mod schema;
mod sealed;
mod secrets;
mod sent_again;
mod settings;
mod several;
mod shortage;
mod tail;
mod tenants;
mod testing;
mod throwaway_server;
mod tls;
mod topics;
#[cfg(feature = "tracing")]
mod traces;
mod typed_queries;
mod verification;
mod wait_reasons;
mod waiting;
mod wake;
mod watch;
mod wire;
