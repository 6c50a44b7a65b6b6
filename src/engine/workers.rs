//! The seam, second half: what works for members on the threads of a relay (see `engine/directory.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claim::sql::glance::Marks;
use super::clean::chore::Chore;
use super::host::database::DatabaseResult;
use super::host::session::Session;
use super::host::shared::Shared;
use super::lease::sql::lease::LeaseId;
use super::send::gate::ExchangeTime;
use super::settle::settlement::Outcomes;
use crate::sql::brief::Tried;

/// The work for members that the threads of a relay do.
pub(crate) trait Workers: Send + Sync {
    /// The threads that send, until the relay stops.
    fn run(&self, shared: &Arc<Shared>, outcomes: &Outcomes);

    /// What the janitor does for members.
    fn chores<'a>(&'a self, shared: &'a Shared) -> Vec<Box<dyn Chore + 'a>>;

    /// What reads the members, for one thread.
    fn keeper(&self) -> Box<dyn Keeper<Session>>;
}

/// What a survey has found out about members.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SurveyedMembers {
    /// The marks, and the time that the survey took.
    pub(crate) marks: Option<(Marks, Duration)>,
    /// The start time of the server.
    pub(crate) server: i64,
}

/// Whether the roster has changed.
pub(crate) type IsNew = bool;

/// Reads the members, on the claimer's thread, and records what their gates have found.
pub(crate) trait Keeper<D> {
    /// When the members are read next: `Some(None)` now, `None` never.
    fn due(&self) -> Option<Option<Instant>>;

    /// Whether a survey may find out that the members are the same.
    fn asks_marks(&self) -> bool;

    /// Reads the members. `waiting`: names that neither the settings nor the members have. With `surveyed`, only if they
    /// have changed since.
    fn read(
        &mut self,
        shared: &Shared,
        db: &mut D,
        waiting: &[String],
        surveyed: Option<SurveyedMembers>,
    ) -> DatabaseResult<Tried<IsNew>>;

    /// Tells other relays what they must know of the members, if that has changed. Called after each survey.
    fn publish(&mut self, db: &mut D, lease: LeaseId) -> DatabaseResult<()>;

    /// Records the changes of the members' gates, and opens those whose pause has expired.
    fn exchange(&mut self, shared: &Shared, db: &mut D, when: ExchangeTime) -> DatabaseResult<()>;
}
