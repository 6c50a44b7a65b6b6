//! The roster and the directory of a relay without members: routes only.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::routes::{Routes, Way};
use crate::clock;
use crate::dispatch::Failure;
use crate::engine::claim::sql::claim::{Reads, Topic};
use crate::engine::claim::sql::namesakes::OF_ROUTE;
use crate::engine::directory::{At, Decided, Directory, Fate, Roster};
use crate::engine::observe::health::{Problem, ProblemKind};
use crate::engine::plan::to::To;
use crate::engine::settle::sql::split::Parts;
use crate::lock::lock;
use crate::message::Message;
use crate::status::ReasonCode;

/// How long a relay leaves a message to the other relays.
const LEFT_TO_OTHERS: Duration = Duration::from_secs(5);
/// How long it is a problem that a message was left to the other relays: several times as long as each is left.
const REMEMBERED: Duration = Duration::from_secs(30);
const UNKNOWN: &str = "somebody is registered who may want the message, and this program is built without the feature `endpoints`";

/// The configured destinations of a relay, and their routes.
#[derive(Debug, Clone)]
pub(crate) struct Configured {
    routes: Arc<Routes>,
    /// What asks whether members are there that this relay must not pass over.
    read_to: Option<Arc<dyn Reads>>,
    /// When a message was last left to the other relays, because members may want it.
    left: Arc<Mutex<Option<Instant>>>,
}

impl Configured {
    /// With `read_to`, messages that members may want wait.
    pub(crate) fn new(routes: Arc<Routes>, read_to: Option<Arc<dyn Reads>>) -> Self {
        Self {
            routes,
            read_to,
            left: Arc::default(),
        }
    }
}

/// The message is addressed to a member, of which this relay knows none.
fn of_a_member(message: &Message) -> Fate {
    let name = &message.destination;
    let error = format!("the message is for a registration of {name:?}, and this relay knows none");
    waits(ReasonCode::UnknownDestination, error)
}

/// Members may want the message, and this relay cannot know. Its topic is told to the directory.
fn unknown(message: &Message) -> Decided {
    Decided {
        fate: waits(ReasonCode::NotFannedOut, UNKNOWN),
        doubtful: vec![Arc::from(message.topic.as_str())],
    }
}

fn waits(reason: ReasonCode, error: impl Into<String>) -> Fate {
    Fate::Waits(Failure::new(reason, error), LEFT_TO_OTHERS)
}

/// The rows that a message gets in its place, after the last one that it has. Parts are placed in the order of their names,
/// so the last placed part says which are left.
pub(crate) fn parts(parts: BTreeMap<String, Option<Uuid>>, after: Option<&String>) -> Parts {
    let left = parts.into_iter();
    let left = left.filter(|(name, _)| after.is_none_or(|last| name > last));
    let (to, registrations) = left.unzip();
    Parts { to, registrations }
}

impl Roster for Configured {
    fn way(&self, topic: &Topic) -> To {
        self.routes.find(&topic.topic, &topic.destination).into()
    }

    fn decide(&self, message: &Message, at: &At<'_>) -> Decided {
        let way = self.routes.find(&message.topic, &message.destination);
        let is_addressed = !message.destination.is_empty();
        let is_of_a_member = message.registration.is_some_and(|id| id != OF_ROUTE);
        let names = |numbers: &[usize]| {
            let names = self.routes.names_of(numbers);
            let names = names.map(|name| (name.to_owned(), None)).collect();
            Fate::Parts(parts(names, message.split_to.as_ref()))
        };
        let fate = match way {
            Way::NotTaken | Way::UnknownDestination => Fate::Elsewhere,
            _ if !is_addressed && at.seen.is_some() => return unknown(message),
            _ if is_addressed && is_of_a_member => of_a_member(message),
            Way::To(number) if is_addressed || message.split_to.is_none() => Fate::Bulkhead(number),
            Way::To(number) => names(&[number]),
            Way::Split(numbers) => names(numbers),
            Way::NoRoute => Fate::Elsewhere,
        };
        fate.into()
    }
}

impl Directory for Configured {
    fn roster(&self) -> Arc<dyn Roster> {
        Arc::new(self.clone())
    }

    fn read_to(&self) -> Option<Arc<dyn Reads>> {
        self.read_to.clone()
    }

    fn doubted(&self, _: &str, _: &Message) {
        *lock(&self.left) = Some(clock::now());
    }

    fn problems(&self, now: Instant) -> Vec<Problem> {
        let left = *lock(&self.left);
        let is_lately = left.is_some_and(|at| now.saturating_duration_since(at) < REMEMBERED);
        let problem = is_lately.then(|| Problem {
            kind: ProblemKind::EndpointRefused,
            what: format!(
                "{UNKNOWN}: messages that name no destination wait. Build every program that relays messages of this outbox with the feature, or remove who is registered"
            ),
        });
        problem.into_iter().collect()
    }
}
