//! The laboratory: `outbox-lab` demonstrates and measures on a real PostgreSQL, with a real receiver.

#[allow(dead_code, reason = "the suite uses all of it")]
#[path = "../suite/fresh.rs"]
mod fresh;
#[path = "../support.rs"]
mod support;

mod bench;
mod commands;
mod demo;
