//! The seam between the engine and destinations that come and go while a relay runs. Such a destination is a *member*.
//! Who knows the members says where messages go; the engine claims, sends and settles, and asks nothing about why. What
//! works for members on the relay's threads is in `engine/workers.rs`.
//!
//! A relay without members has [`Configured`](crate::engine::serves::configured::Configured) alone.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::claim::sql::claim::{Reads, Topic};
use super::claim::sql::namesakes::Namesakes;
use super::observe::health::Problem;
use super::plan::to::To;
use super::send::gate::Trouble;
use super::send::job::Job;
use super::send::limits::Limits;
use super::send::sql::pause::Paused;
use super::settle::sql::split::Parts;
use crate::dispatch::Failure;
use crate::message::Message;

/// What becomes of one message.
#[derive(Debug)]
pub(crate) enum Fate {
    /// It is sent by the senders of this bulkhead.
    Bulkhead(usize),
    /// It is sent to this member, with this name and registration; left to other relays, if nothing is sent to it.
    Member(u32, Arc<str>, Uuid),
    /// It gets these rows in its place. Without rows, it was fanned out before.
    Parts(Parts),
    /// It is settled: nobody wants it.
    Nobody,
    /// It waits for this time.
    Waits(Failure, Duration),
    /// It can never be delivered to the destination that it names.
    Dead(Failure),
    /// It is left to other relays.
    Elsewhere,
    /// That depends on what members there are now.
    Ask,
}

/// What becomes of a message, and the members that do not get it although it may be for them.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) fate: Fate,
    pub(crate) doubtful: Vec<Arc<str>>,
}

impl From<Fate> for Decided {
    fn from(fate: Fate) -> Self {
        Self {
            fate,
            doubtful: Vec::new(),
        }
    }
}

/// How new a roster is, compared with the claim of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Read after the claim.
    Fresh,
    /// Older: a fate that depends on a read is [`Fate::Ask`].
    NotAsked,
    /// Older, because another session has locked a table.
    Locked,
}

/// The circumstances of a decision.
pub(crate) struct At<'a> {
    pub(crate) now: Instant,
    /// What the claim has seen of new members.
    pub(crate) seen: Option<i64>,
    pub(crate) reading: Reading,
    /// How many more messages a member may have.
    pub(crate) left: &'a dyn Fn(u32) -> usize,
}

/// Where messages go, at one point in time: a value. By default, there are no members.
pub(crate) trait Roster: Debug + Send + Sync {
    /// Where messages of this topic and destination go.
    fn way(&self, topic: &Topic) -> To;

    /// What becomes of a claimed message.
    fn decide(&self, message: &Message, at: &At<'_>) -> Decided;

    /// The member with this name.
    fn member(&self, _name: &str) -> Option<u32> {
        None
    }

    /// Whether the member is there.
    fn has(&self, _member: u32) -> bool {
        false
    }

    /// `None`: nothing is sent to the member.
    fn limits(&self, _member: u32) -> Option<&Limits> {
        None
    }

    /// The tenant with whose members this one shares its turns.
    fn tenant(&self, _member: u32) -> Option<Uuid> {
        None
    }

    /// Which messages are left to other relays by their addresses.
    fn namesakes(&self) -> Option<&Namesakes> {
        None
    }

    /// Whether there is no member.
    fn is_empty(&self) -> bool {
        true
    }

    /// Whether runs of some member have more than one message.
    fn has_runs(&self) -> bool {
        false
    }
}

/// Which members get messages now.
#[derive(Debug, Clone, Default)]
pub(crate) struct Doors {
    pub(crate) closed: HashSet<u32>,
    /// They get one message, as a probe.
    pub(crate) probed: HashSet<u32>,
    /// When the first closed one opens.
    pub(crate) opens_at: Option<Instant>,
}

/// The members, and what sends to them. By default, there are none. The engine holds no lock while it calls.
pub(crate) trait Directory: Send + Sync {
    fn roster(&self) -> Arc<dyn Roster>;

    fn doors(&self) -> Doors {
        Doors::default()
    }

    /// Up to where the members are read.
    fn read_to(&self) -> Option<Arc<dyn Reads>>;

    /// Whether this relay sends to members.
    fn can_send(&self) -> bool {
        false
    }

    /// The most messages of the next claim for a member, by the time that its sends take.
    fn prefetch(&self, _member: u32) -> Option<usize> {
        None
    }

    /// Takes over jobs for members.
    fn put(&self, _jobs: Vec<Job>) {}

    /// Gives back the jobs that no thread has taken.
    fn take_back(&self) -> Vec<Job> {
        Vec::new()
    }

    /// The messages that wait for a thread, and for nothing else.
    fn moving(&self) -> usize {
        0
    }

    /// Whether all messages here wait for a time.
    fn only_waits(&self) -> bool {
        false
    }

    /// Learns the pauses of the table.
    fn paused(&self, _rows: &[Paused], _now: Instant) {}

    /// Why this relay cannot send to members, for reasons of its own.
    fn troubles(&self) -> Vec<(Arc<str>, Trouble)> {
        Vec::new()
    }

    /// Tells people that a member, or whoever wants a topic, does not get a message that may be for it.
    fn doubted(&self, _member: &str, _message: &Message) {}

    /// What people should know of members.
    fn problems(&self, _now: Instant) -> Vec<Problem> {
        Vec::new()
    }
}

/// The lengths of claims for members, before a lock is taken.
pub(crate) type Prefetched = HashMap<u32, Option<usize>>;
