//! Failures of relays and databases. The tests run one at a time, so each has the machine to itself.

#[path = "../page.rs"]
mod page;
#[path = "../support.rs"]
mod support;

mod copies;
mod doubt;
mod feeds;
mod ground;
mod kill;
mod lost_answers;
mod memory;
mod outage;
mod people;
mod shutdown;
mod stop;
mod takeover;
mod wedged;
