//! Choosing which of the found messages to claim.

use std::collections::HashMap;
use std::time::Instant;

use super::Planner;
use super::contention::OfKeys;
use super::lanes::SeenStreams;
use super::to::To;
use super::view::View;
use crate::engine::claim::sql::page::{Free, Page};
use crate::engine::claim::sql::search::Ask;
use crate::engine::keys::sql::ordered::{Candidate, Key};

/// The messages of a page that are to be claimed.
#[derive(Debug, Default)]
pub(crate) struct Picked {
    /// The messages without a key.
    pub(crate) plain: Vec<i64>,
    /// The first messages of their keys. Also expired messages without a key.
    pub(crate) keyed: Vec<Candidate>,
    /// Not chosen, in the order of the page.
    pub(super) left: Vec<Left>,
}

/// The claim of chosen messages.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// The claimed sequences.
    pub(crate) claimed: Vec<i64>,
    /// Some messages were left out because of their size.
    pub(crate) is_cut: bool,
    pub(crate) of_keys: OfKeys,
}

/// A message that is left for another time.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) key: Option<Key>,
    pub(super) to: To,
    /// Whether the destination has room, for other messages.
    pub(super) has_room: bool,
    /// Whether the message may be sent as soon as there is room.
    pub(super) is_open: bool,
}

impl Planner<'_> {
    /// Chooses the messages of a page for which there is room.
    pub(crate) fn pick(&mut self, now: Instant, ask: &Ask, page: &Page, view: &View) -> Picked {
        let mut picked = Picked::default();
        let candidate = |free: &Free, goes_to| Candidate {
            sequence: free.sequence,
            goes_to,
        };
        match ask {
            Ask::Expired(..) => {
                // They are dead-lettered, whatever room there is.
                let found = page
                    .found
                    .iter()
                    .filter(|free| !self.directory.leaves(free));
                picked.keyed = found.map(|free| candidate(free, String::new())).collect();
                return picked;
            }
            Ask::Late(_) | Ask::Range(_) => self.learn_streams(now, page),
            Ask::Keys(_) | Ask::Walk(_) => {}
        }
        if matches!(ask, Ask::Late(_)) {
            // The next claims of their lanes and keys find them.
            return picked;
        }
        let mut taken: HashMap<To, usize> = HashMap::new();
        let most = view.left_to_claim.unwrap_or(usize::MAX);
        for free in &page.found {
            let topic = free.topic();
            if self.lanes.kept_back.has(&topic) || self.directory.leaves(free) {
                continue;
            }
            let (to, key) = (self.directory.roster.way(&topic), free.key());
            let (count, room) = (taken.entry(to).or_default(), view.room_of(to));
            if *count >= room || picked.plain.len() + picked.keyed.len() >= most {
                picked.left.push(Left {
                    key,
                    to,
                    has_room: room > 0,
                    is_open: view.is_open(to),
                });
                continue;
            }
            *count += 1;
            match key {
                None => picked.plain.push(free.sequence),
                Some(_) => (picked.keyed).push(candidate(free, self.directory.goes_to(&topic))),
            }
        }
        picked
    }

    /// The streams of messages that were found by their sequences may be unknown if queries for streams time out.
    fn learn_streams(&mut self, now: Instant, page: &Page) {
        let seen = SeenStreams {
            found: page.found.iter().map(Free::found).collect(),
            is_all: false,
            slow: Some(self.timing.moment),
        };
        self.take_over(seen, now);
    }
}
