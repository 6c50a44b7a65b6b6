//! Tests against a real PostgreSQL and real sockets. Each module is a part of the contract.

#[path = "../support.rs"]
mod support;

mod acceptance;
mod commands;
mod enqueue;
mod fresh;
mod handle;
mod odd_rows;
mod receivers;
mod schema;
mod topics;
