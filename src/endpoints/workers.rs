//! What works for endpoints on the threads of a relay.

use std::sync::Arc;

use super::keeper::EndpointKeeper;
use super::serving::ServedEndpoints;
use super::{old_records, overdue, pool, unread, verifications};
use crate::engine::clean::chore::Chore;
use crate::engine::host::session::Session;
use crate::engine::host::shared::Shared;
use crate::engine::settle::settlement::Outcomes;
use crate::engine::workers::{Keeper, Workers};

pub(crate) struct EndpointWorkers(pub(crate) Arc<ServedEndpoints>);

impl Workers for EndpointWorkers {
    fn run(&self, shared: &Arc<Shared>, outcomes: &Outcomes) {
        if let Some(all) = shared.bulkheads.last() {
            pool::run(&self.0, shared, all, outcomes);
        }
    }

    fn chores<'a>(&'a self, shared: &'a Shared) -> Vec<Box<dyn Chore + 'a>> {
        vec![
            verifications::chore(&self.0, shared),
            overdue::chore(&self.0),
            unread::chore(&self.0, shared),
            old_records::chore(),
        ]
    }

    fn keeper(&self) -> Box<dyn Keeper<Session>> {
        Box::new(EndpointKeeper::new(Arc::clone(&self.0)))
    }
}
