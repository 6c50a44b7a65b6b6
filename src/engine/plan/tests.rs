//! The planner in given states, and its next steps.

mod room;
mod undoing;

use std::collections::HashSet;
use std::sync::Arc;

use super::kept_back::KeptBack;
use super::pace::{Last, REST};
use super::search::Search;
use super::*;
use crate::config::{Config, Destination, Route};
use crate::engine::claim::custody::InCustody;
use crate::engine::claim::doubt::{AtWork, RanBy};
use crate::engine::claim::sql::claim::{
    Batch, Claimed, KnownDelivery, Position, Stream, TakenOver, Topic,
};
use crate::engine::claim::sql::page::{Free, Moment, Page, Writers};
use crate::engine::claim::sql::streams::FoundStream;
use crate::engine::keys::sql::ordered::Key;
use crate::engine::serves::configured::Configured;
use crate::engine::serves::routes::Routes;
use crate::engine::settle::sql::settle::Released;
use crate::message::{Message, Sequence};
use crate::sql::brief::Tried;
use crate::sql::range::Range;

const LEASE: LeaseId = LeaseId(7);
const POLL: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// Topics `a` and `b` each go to their own destination; other topics go nowhere.
fn routes() -> Arc<dyn Roster> {
    let mut config = Config::default();
    for name in ["a", "b"] {
        let destination = Destination::new(name, "http://a").expect("a URL");
        config.destinations.push(destination);
        config.routes.push(Route::new(name, name));
    }
    Arc::new(Configured::new(Arc::new(Routes::new(&config)), None))
}

fn timing() -> Timing {
    Timing {
        is_enabled: true,
        poll_interval: POLL,
        moment: Duration::from_millis(250),
    }
}

impl SearchPass {
    /// An idle pass of a look that begins now.
    pub(super) fn at(now: Instant) -> Self {
        Self {
            now,
            since: now,
            is_idle: true,
            is_asked: false,
            has_keyed: true,
            is_limited: false,
            passed: None,
        }
    }
}

/// A planner, the time, and the view of the other threads.
struct Ground<'a> {
    planner: Planner<'a>,
    now: Instant,
    view: View,
    /// The leases whose messages are in flight.
    held: HashSet<LeaseId>,
}

fn topic(topic: &str) -> Topic {
    Topic {
        topic: topic.to_owned(),
        destination: String::new(),
    }
}

fn stream(of: &str, is_keyed: bool) -> Stream {
    Stream {
        topic: topic(of),
        is_keyed,
    }
}

/// A lost result of a claim under [`LEASE`].
fn doubt(number: u64) -> Doubt {
    Doubt::new(LEASE, RanBy::Any, number, Instant::now())
}

/// A survey that has found nothing.
fn nothing() -> Surveyed {
    Surveyed {
        streams: None,
        took: Duration::ZERO,
        shortened: Vec::new(),
        ended: Vec::new(),
        is_active: false,
        time: 0,
        server: 0,
        paused: Tried::Locked,
        marks: None,
    }
}

fn key(name: &str) -> Key {
    Key {
        ordering_key: name.to_owned(),
        destination: String::new(),
    }
}

fn found(streams: &[Stream]) -> Option<Vec<FoundStream>> {
    let found = |stream: &Stream| FoundStream {
        stream: stream.clone(),
        first: Position::START,
    };
    Some(streams.iter().map(found).collect())
}

pub(crate) fn claimed(sequence: i64, topic: &str, ordering_key: Option<&str>) -> Claimed {
    let message = Message {
        sequence: Sequence(sequence),
        message_id: uuid::Uuid::nil(),
        ordering_key: ordering_key.map(str::to_owned),
        created_at: std::time::UNIX_EPOCH,
        ..Message::unstored(topic, "", None, &1.into())
    };
    Claimed {
        message: Box::new(message),
        position: Position {
            available_at: 0,
            sequence,
        },
        known: KnownDelivery::No,
        taken_over: TakenOver::No,
    }
}

fn batch(claimed: Vec<Claimed>) -> Batch {
    Batch {
        behind: Vec::new(),
        registrations: None,
        claimed,
        is_cut: false,
    }
}

/// The result of a query for late messages, while no transaction writes.
fn late(free: &[Free]) -> Page {
    Page {
        found: free.to_vec(),
        next: None,
        moment: Some(Moment {
            newest: None,
            writers: Writers { oldest: 1, next: 1 },
        }),
    }
}

fn keys(names: &[&str]) -> Step {
    let keys = names.iter().map(|name| key(name)).collect();
    Step::Search(Ask::Keys(keys))
}

/// A free message of the key `k`.
fn head(of: &str, sequence: i64) -> Page {
    let free = Free {
        sequence,
        topic: of.to_owned(),
        destination: String::new(),
        ordering_key: Some("k".to_owned()),
        available_at: diesel::pg::data_types::PgTimestamp(0),
        registration: None,
    };
    Page {
        found: vec![free],
        ..Page::default()
    }
}

impl<'a> Ground<'a> {
    /// A planner that has just started.
    fn new(roster: &Arc<dyn Roster>) -> Self {
        let now = Instant::now();
        let door = Door {
            room: 100,
            is_open: true,
            opens_at: None,
        };
        let view = View {
            lease: Some(LEASE),
            may_send: true,
            doors: vec![door; 2],
            room_to_split: 100,
            room_of_feeds: 100,
            custody: InCustody {
                is_nothing_in_flight: true,
                ..InCustody::default()
            },
            ..View::default()
        };
        Self {
            planner: Planner::new(now, timing(), Arc::clone(roster), vec!["a", "b"]),
            now,
            view,
            held: HashSet::new(),
        }
    }

    /// A planner that has surveyed these streams.
    fn with(roster: &Arc<dyn Roster>, streams: &[Stream]) -> Self {
        let mut ground = Self::new(roster);
        ground.survey(streams);
        ground.planner.stage = RoundStage::Undo;
        ground
    }

    /// The next step, if there are no late messages.
    fn next(&mut self) -> Step {
        match self.planner.next(self.now, &self.view) {
            Step::Search(ask @ Ask::Late(_)) => {
                self.found_late(ask, &[], Duration::from_millis(1));
                self.planner.stage = RoundStage::Claim;
                self.next()
            }
            step => step,
        }
    }

    /// The next step other than the gates.
    fn step(&mut self) -> Step {
        match self.next() {
            Step::Gates { .. } => self.next(),
            step => step,
        }
    }

    /// Begins a round with a survey.
    fn begin_survey(&mut self) -> Survey {
        self.planner.stage = RoundStage::Undo;
        match self.step() {
            Step::Survey(survey) => survey,
            other => panic!("{other:?}"),
        }
    }

    fn survey(&mut self, streams: &[Stream]) {
        let found = Surveyed {
            streams: found(streams),
            is_active: true,
            ..nothing()
        };
        self.surveyed(found);
    }

    fn surveyed(&mut self, found: Surveyed) -> bool {
        let survey = self.begin_survey();
        self.planner.surveyed(self.now, survey, found, &self.held)
    }

    /// Answers each claim with no messages, until the planner waits.
    fn wait(&mut self) -> Wait {
        for _ in 0..100 {
            match self.step() {
                Step::Claim { plain, keyed, .. } => self.bring(&[plain, keyed].concat(), vec![]),
                Step::Search(ask @ Ask::Walk(_)) => {
                    self.found(ask, Page::default(), Claims::default());
                }
                Step::LookAgain => match self.planner.look_again(self.now, &self.view) {
                    Step::Wait(wait) => return wait,
                    Step::Again => {}
                    other => panic!("{other:?}"),
                },
                Step::Again => {}
                Step::Wait(wait) => return wait,
                other => panic!("{other:?}"),
            }
        }
        panic!("the planner never waits");
    }

    /// Answers a search. Returns the sequences that the planner has picked of keyed messages.
    fn found(&mut self, ask: Ask, page: Page, claims: Claims) -> Vec<i64> {
        let picked = self.planner.pick(self.now, &ask, &page, &self.view);
        let sequences = picked.keyed.iter().map(|one| one.sequence).collect();
        let outcome = SearchOutcome::Done(Box::new(super::FoundMessages {
            page,
            picked,
            claims,
        }));
        let finished = Finished {
            ask,
            outcome,
            last: Last {
                ended: self.now,
                took: Duration::from_millis(1),
            },
        };
        self.planner.searched(finished);
        sequences
    }

    fn found_late(&mut self, ask: Ask, free: &[Free], took: Duration) {
        let page = late(free);
        let picked = self.planner.pick(self.now, &ask, &page, &self.view);
        let outcome = SearchOutcome::Done(Box::new(super::FoundMessages {
            page,
            picked,
            claims: Claims::default(),
        }));
        let finished = Finished {
            ask,
            outcome,
            last: Last {
                ended: self.now,
                took,
            },
        };
        self.planner.searched(finished);
    }

    /// The next step, which asks for late messages.
    fn asks_for_late(&mut self) -> Ask {
        loop {
            match self.planner.next(self.now, &self.view) {
                Step::Search(ask @ Ask::Late(_)) => return ask,
                Step::Gates { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The next step, which asks for freed keys.
    fn asks_for_keys(&mut self) -> Ask {
        match self.step() {
            Step::Search(ask @ Ask::Keys(_)) => ask,
            other => panic!("{other:?}"),
        }
    }

    fn bring(&mut self, asked: &[Lane], claimed: Vec<Claimed>) {
        self.bring_with(asked, claimed, OfKeys::None);
    }

    fn bring_with(&mut self, asked: &[Lane], claimed: Vec<Claimed>, of_keys: OfKeys) {
        let brought = Brought {
            room: usize::MAX,
            batch: &batch(claimed),
            of_keys,
            reached: &HashMap::new(),
            took: Duration::ZERO,
        };
        self.planner.claimed(self.now, asked, &brought);
    }
}

/// So many messages of a part were released.
fn released(messages: usize) -> Option<Released> {
    Some(Released {
        messages,
        are_some_locked: false,
    })
}

#[test]
fn a_round_hears_the_gates_and_surveys_before_it_claims() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    assert!(matches!(ground.next(), Step::Gates { may_probe: true }));
    let Step::Survey(survey) = ground.next() else {
        panic!("expected the first survey");
    };
    assert_eq!(survey.streams, Streams::All);
    let found = Surveyed {
        streams: found(&[stream("a", false), stream("a", true)]),
        is_active: true,
        ..nothing()
    };
    assert!(
        !ground
            .planner
            .surveyed(ground.now, survey, found, &ground.held)
    );
    // The walk goes first, for keys with a backlog. Then lanes and walk take turns.
    let walk = Step::Search(Ask::Walk(Key::default()));
    assert_eq!(ground.next(), walk);
    assert!(matches!(ground.next(), Step::Gates { may_probe: true }));
    let Step::Claim { plain, keyed, room } = ground.next() else {
        panic!("expected a claim");
    };
    assert_eq!((plain.len(), keyed.len(), room), (1, 1, usize::MAX));
    ground.now += surveys::INTERVAL;
    assert!(matches!(ground.next(), Step::Gates { may_probe: true }));
    assert!(
        matches!(ground.next(), Step::Survey(_)),
        "a second has passed"
    );
}

/// R9: the order of the list of searches is their priority; lanes come last.
#[test]
fn searches_come_in_the_order_of_their_priority() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false), stream("a", true)]);
    (ground.planner).hear(Report::Unserved(vec![topic("c")]));
    ground.planner.searches.free([key("k")]);
    ground.planner.searches.patrol.want(ground.now);
    let mut kinds = Vec::new();
    while kinds.len() < 7 {
        match ground.planner.next(ground.now, &ground.view) {
            Step::Gates { .. } => {}
            Step::Search(ask) => {
                kinds.push(match &ask {
                    Ask::Expired(..) => "unserved",
                    Ask::Late(_) => "late",
                    Ask::Keys(_) => "freed",
                    Ask::Range(_) => "patrol",
                    Ask::Walk(_) => "walk",
                });
                ground.found(ask, late(&[]), Claims::default());
            }
            Step::Claim { .. } => kinds.push("lanes"),
            other => panic!("{other:?}"),
        }
    }
    // Freed keys, the patrol and the walk take every other turn.
    let expected = [
        "unserved", "late", "freed", "patrol", "walk", "patrol", "lanes",
    ];
    assert_eq!(kinds, expected);
}

/// R27
#[test]
fn a_relay_that_is_not_to_work_or_has_no_lease_waits() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    ground.view.lease = None;
    let expected = Wait::until(ground.now + LEASE_INTERVAL);
    assert_eq!(ground.next(), Step::Wait(expected));
    ground.view.custody.question = 3;
    ground.planner.timing.is_enabled = false;
    let expected = Wait {
        answers: Some(3),
        ..Wait::until(ground.now + POLL)
    };
    assert_eq!(ground.next(), Step::Wait(expected));
}

/// R9: work that a look has left out is done when its time comes, not at the next poll.
#[test]
fn the_wait_ends_when_a_look_for_streams_is_owed() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    let slow = Duration::from_millis(200);
    let slowly = || Surveyed {
        streams: found(&[]),
        took: slow,
        is_active: true,
        ..nothing()
    };
    ground.surveyed(slowly());
    assert_eq!(ground.wait().until, ground.now + POLL);
    ground.planner.hear(Report::News);
    ground.surveyed(slowly());
    let looked = ground.now;
    ground.planner.hear(Report::News);
    let survey = ground.begin_survey();
    assert!(
        matches!(survey.streams, Streams::Behind(_)),
        "the last query was slow"
    );
    (ground.planner).surveyed(
        ground.now,
        survey,
        Surveyed {
            is_active: true,
            ..nothing()
        },
        &ground.held,
    );
    let owed = looked + REST * slow;
    assert_eq!(ground.wait().until, owed);
    // Found by the simulation (seed 39839): the query came due between two surveys while the relay waited for room, and
    // from then on every wait ended at once.
    ground.view.is_queue_full = true;
    let wait = ground.wait();
    let expected = (Awaited::Room, owed, false);
    assert_eq!((wait.what, wait.until, wait.is_poll), expected);
    ground.now = owed;
    ground.planner.surveys.end(owed, owed, POLL);
    (ground.planner).waited(owed, Awaited::Room, false, true);
    assert!(!matches!(ground.begin_survey().streams, Streams::Behind(_)));
}

/// G2: the database's answer takes a while, and a floor must not pass messages that are enqueued meanwhile.
#[test]
fn a_lane_continues_after_the_present_of_the_database() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    let survey = ground.begin_survey();
    // The answer takes three seconds: the database read its clock at some moment in between.
    ground.now += 3 * SECOND;
    let time = 1_000_000_000;
    let found = Surveyed {
        streams: found(&[stream("a", false)]),
        is_active: true,
        time,
        ..nothing()
    };
    ground
        .planner
        .surveyed(ground.now, survey, found, &ground.held);
    let asked = |ground: &mut Ground| match ground.step() {
        Step::Claim { plain, .. } => plain,
        other => panic!("{other:?}"),
    };
    let sweep = asked(&mut ground);
    let brought = Brought {
        room: usize::MAX,
        batch: &Batch::default(),
        of_keys: OfKeys::None,
        reached: &HashMap::new(),
        took: SECOND / 2,
    };
    ground.planner.claimed(ground.now, &sweep, &brought);
    assert_eq!(ground.wait().what, Awaited::Work);
    ground.planner.waited(ground.now, Awaited::Work, true, true);
    let after = asked(&mut ground)[0].after;
    assert!(after > Position::START, "the lane was swept just now");
    let began = Position::of_time(time - 500_000);
    assert!(after <= began, "{after:?}");
}

/// R9: an application may notify the relay with each commit.
#[test]
fn news_that_never_ends_keeps_no_claim_back() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    ground.planner.hear(Report::News);
    ground.survey(&[stream("a", false)]);
    ground.planner.hear(Report::News);
    assert!(matches!(ground.next(), Step::Claim { .. }));
    ground.begin_survey();
}

/// R9: a look answers the question whether anything is due only if it began after the question.
#[test]
fn a_question_is_answered_by_a_look_that_began_later_and_found_nothing() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    ground.view.custody.question = 1;
    ground.view.custody.is_asked = true;
    assert_eq!(
        ground.wait().answers,
        Some(0),
        "the look began before the question"
    );
    ground.planner.hear(Report::News);
    ground.survey(&[stream("a", false)]);
    let Step::Claim { plain, .. } = ground.step() else {
        panic!("expected a claim");
    };
    ground.bring(&plain, vec![claimed(1, "a", None)]);
    assert_eq!(ground.wait().answers, None, "the look has found a message");
    ground.view.custody.is_nothing_in_flight = false;
    ground
        .planner
        .waited(ground.now, Awaited::Work, true, false);
    assert_eq!(ground.wait().answers, None, "a message was in flight");
    ground.planner.waited(ground.now, Awaited::Work, true, true);
    assert_eq!(ground.wait().answers, Some(1));
}

/// R9: a claim under an expired lease returns nothing, whatever is due.
#[test]
fn a_question_waits_while_the_lease_may_have_expired() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    ground.view.custody.question = 1;
    ground.view.may_send = false;
    ground.survey(&[stream("a", false)]);
    assert_eq!(ground.wait().answers, None);
    ground.view.may_send = true;
    ground.planner.waited(ground.now, Awaited::Work, true, true);
    assert_eq!(ground.wait().answers, Some(1));

    ground.view.custody.question = 2;
    ground.planner.hear(Report::News);
    ground.survey(&[stream("a", false)]);
    // Another lease, during the look.
    ground.view.lease = Some(LeaseId(8));
    ground.planner.stage = RoundStage::Survey;
    assert!(
        matches!(ground.step(), Step::Survey(_)),
        "a new look begins"
    );
}

/// R8: a survey may have missed messages that were announced while it ran.
#[test]
fn news_of_the_time_of_a_survey_is_looked_for_before_the_wait() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    ground.survey(&[]);
    ground.planner.hear(Report::News);
    assert_eq!(ground.step(), Step::LookAgain);
    let again = ground.planner.look_again(ground.now, &ground.view);
    assert_eq!(again, Step::Again, "the planner does not wait");
    ground.survey(&[]);
    assert_eq!(ground.wait().what, Awaited::Work);
}

/// R46: under load, each message may be announced, and a survey takes long compared with a claim.
#[test]
fn news_soon_after_a_survey_asks_the_known_lanes_first() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    let survey = ground.begin_survey();
    let found = Surveyed {
        streams: found(&[stream("a", false)]),
        is_active: true,
        ..nothing()
    };
    let took = Duration::from_millis(5);
    ground.now += took;
    let surveyed = ground.now;
    (ground.planner).surveyed(surveyed, survey, found, &ground.held);
    assert_eq!(ground.wait().until, surveyed + POLL);
    ground.planner.hear(Report::News);
    ground.planner.waited(ground.now, Awaited::Work, true, true);
    assert!(matches!(ground.step(), Step::Claim { .. }));
    let owed = surveyed + surveys::REST_AFTER_NEWS * took;
    assert_eq!(
        ground.wait().until,
        owed,
        "another stream may have messages"
    );
    ground.now = owed;
    ground.begin_survey();
}

/// R46: changed rows are used within a second, even if no survey is due.
#[test]
fn a_survey_is_made_when_the_members_must_be_read() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    let at = ground.now + Duration::from_millis(250);
    ground.planner.hear(Report::RowsOwed(Some(at)));
    assert_eq!(ground.wait().until, at);
    ground.now = at;
    ground.begin_survey();
}

/// R12: a relay that stands by learns under its new lease whether it is active.
#[test]
fn a_lease_that_is_lost_during_a_survey_is_followed_by_another_survey() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    let found = Surveyed {
        is_active: false,
        ..nothing()
    };
    ground.surveyed(found);
    ground.view.lease = None;
    assert!(matches!(ground.next(), Step::Wait(wait) if wait.what == Awaited::Time));
    ground.view.lease = Some(LeaseId(8));
    assert!(matches!(ground.step(), Step::Survey(_)));
}

/// R9: repeated waits of no length would be a busy loop.
#[test]
fn work_owed_only_by_claims_ends_no_wait_of_a_relay_that_does_not_claim() {
    let routes = routes();
    for (is_active, left_to_claim) in [(false, None), (true, Some(0))] {
        let mut ground = Ground::new(&routes);
        ground.planner.searches.patrol.want(ground.now);
        ground.view.left_to_claim = left_to_claim;
        ground.surveyed(Surveyed {
            streams: found(&[stream("a", false)]),
            is_active,
            ..nothing()
        });
        assert_eq!(ground.wait().until, ground.now + POLL);
    }
}

impl Ground<'_> {
    /// The next part of an undo.
    fn part(&mut self) -> Range {
        match self.step() {
            Step::Undo(Undo::Part(part)) => part,
            other => panic!("{other:?}"),
        }
    }

    /// Releases all parts of a pass. The last one has this result, and is returned.
    fn undo_all(&mut self, last: Option<Released>) -> Range {
        loop {
            let part = self.part();
            let is_last = part.upto == i64::MAX;
            let result = if is_last { last } else { released(0) };
            let took = Duration::ZERO;
            self.planner.undone(self.now, part, result, took);
            if is_last {
                return part;
            }
            self.planner.stage = RoundStage::Undo;
        }
    }
}

/// R10
#[test]
fn a_relay_that_stands_by_waits_for_its_turn_and_then_looks_at_everything() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    let standing = |is_active| Surveyed {
        streams: found(&[stream("a", false)]),
        is_active,
        ..nothing()
    };
    ground.surveyed(standing(false));
    assert_eq!(ground.wait().what, Awaited::Turn);
    ground
        .planner
        .waited(ground.now, Awaited::Turn, false, true);
    ground.surveyed(standing(true));
    assert!(matches!(ground.step(), Step::Claim { .. }));
}

/// R10: only one relay at a time has the right to probe. A relay that stands by does not take the right, and does not
/// wait repeatedly for a pause that has already expired.
#[test]
fn a_relay_that_stands_by_probes_no_destination() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    ground.surveyed(Surveyed {
        is_active: false,
        ..nothing()
    });
    ground.view.doors[0] = Door {
        room: 0,
        is_open: false,
        opens_at: Some(ground.now),
    };
    assert!(ground.wait().until > ground.now);
    let turn = Awaited::Turn;
    ground.planner.waited(ground.now, turn, true, true);
    assert_eq!(ground.next(), Step::Gates { may_probe: false });
}

/// R13: after a change of server, the messages of the lease are checked.
#[test]
fn a_server_is_another_one_where_it_was_started_at_another_time() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    assert!(!ground.planner.is_other_server(1), "the first server");
    assert!(!ground.planner.is_other_server(1));
    assert!(ground.planner.is_other_server(2));
    assert!(!ground.planner.is_other_server(2));
}

/// R8: keyed claims exclude one another, and a relay whose claim was blocked does not spin.
#[test]
fn a_relay_that_was_beaten_rests_and_claims_messages_without_keys_meanwhile() {
    let routes = routes();
    let both = [stream("a", false), stream("a", true)];
    let mut ground = Ground::with(&routes, &both);
    ground.bring_with(&[], vec![], OfKeys::Beaten(1.0));
    let rest = Duration::from_millis(1);
    let expected = Wait::until(ground.now + rest);
    assert_eq!(ground.step(), Step::Wait(expected));
    let Step::Claim { plain, keyed, .. } = ground.step() else {
        panic!("expected a claim");
    };
    assert_eq!((plain.len(), keyed.len()), (1, 0));
    ground.now += rest;
    let Step::Claim { plain, keyed, .. } = ground.step() else {
        panic!("expected a claim after the back-off");
    };
    assert_eq!((plain.len(), keyed.len()), (1, 1));
}
