//! The order of the lanes, the waiting messages of one topic and destination.

use std::collections::HashSet;
use std::sync::LazyLock;

use super::super::pace::Last;
use super::*;
use crate::config::{Config, Destination, Route};
use crate::engine::directory::Roster;
use crate::engine::plan::pace::REST;
use crate::engine::serves::configured::Configured;
use crate::engine::serves::routes::Routes;

fn stream(topic: &str) -> Stream {
    Stream {
        topic: Topic {
            topic: topic.to_owned(),
            destination: String::new(),
        },
        is_keyed: false,
    }
}

/// A survey that has found exactly these topics.
fn all(topics: &[&str]) -> SeenStreams {
    let found = |topic: &&str| FoundStream {
        stream: stream(topic),
        first: Position::START,
    };
    SeenStreams {
        found: topics.iter().map(found).collect(),
        is_all: true,
        slow: None,
    }
}

/// The time of a relay that has not asked the database for its time yet.
fn unknown() -> Now {
    Now {
        here: Instant::now(),
        database: i64::MIN,
    }
}

/// A time at which the database's clock shows `micros`.
fn at(micros: i64) -> Now {
    let here = Instant::now();
    let database = micros;
    Now { here, database }
}

/// This long after a time.
fn after(now: Now, duration: Duration) -> Now {
    Now::new(now.here + duration, Some(now))
}

/// Lanes of topics that all go to one bulkhead.
fn lanes(topics: &[&str], quiet: &[&str]) -> Lanes {
    let config = Config {
        url: Some("http://a".parse().expect("a URL")),
        ..Config::default()
    };
    let mut lanes = Lanes::default();
    lanes.take_over(all(topics), by(&config), unknown());
    for lane in &mut lanes.lanes {
        lane.is_quiet = quiet.contains(&lane.stream.topic.topic.as_str());
    }
    lanes
}

/// So many lanes, each of a member with its number, from 1 on.
fn lanes_of_members(count: u32) -> Lanes {
    let names: Vec<String> = (0..count).map(|n| format!("t{n:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut lanes = Lanes::default();
    let number = std::cell::Cell::new(0);
    let way = |_: &Topic| {
        number.set(number.get() + 1);
        To::Member(number.get())
    };
    lanes.take_over(all(&names), way, unknown());
    lanes
}

/// The lanes of the next claim. The planner often only asks whether there are any.
fn turn(lanes: &mut Lanes, room: usize, tenant: impl Fn(To) -> Option<Uuid> + Copy) -> Vec<Lane> {
    let _ = lanes.allot(unknown(), |_| room, tenant, false);
    let asked = lanes.allot(unknown(), |_| room, tenant, false);
    lanes.end_turn();
    asked
}

fn lane(name: &str, room: usize) -> Lane {
    Lane {
        stream: stream(name),
        room,
        after: Position::START,
    }
}

fn brought(took: Duration) -> Brought<'static> {
    static NOTHING: LazyLock<(Batch, HashMap<Stream, Position>)> = LazyLock::new(Default::default);
    Brought {
        room: usize::MAX,
        batch: &NOTHING.0,
        of_keys: OfKeys::None,
        reached: &NOTHING.1,
        took,
    }
}

#[test]
fn one_busy_topic_gets_all_the_room() {
    let allotted = lanes(&["a"], &[]).allot(unknown(), |_| 500, |_| None, false);
    assert_eq!(allotted, [lane("a", 500)]);
}

#[test]
fn busy_topics_share_the_room_and_quiet_ones_come_first() {
    let allotted = lanes(&["a", "b", "c"], &["b"]).allot(unknown(), |_| 400, |_| None, false);
    assert_eq!(allotted[0], lane("b", 15));
    assert!(allotted[1..].iter().all(|lane| lane.room == 200));
}

#[test]
fn every_one_of_many_topics_is_asked() {
    let names: Vec<String> = (0..200).map(|n| format!("t{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut lanes = lanes(&names, &[]);
    let mut seen = HashSet::new();
    loop {
        let asked = turn(&mut lanes, 10, |_| None);
        if asked.is_empty() {
            break;
        }
        assert!(asked.len() <= MOST_LANES);
        lanes.learn(&asked, &brought(Duration::ZERO), unknown());
        seen.extend(asked.into_iter().map(|lane| lane.stream));
    }
    assert_eq!(seen.len(), names.len());
}

#[test]
fn tenants_take_turns_however_many_lanes_each_has() {
    let names: Vec<String> = (0..1000).map(|n| format!("t{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (large, small) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let mut lanes = Lanes::default();
    let mut number = 0;
    let way = |_: &Topic| {
        number += 1;
        To::Member(number - 1)
    };
    let way = std::cell::RefCell::new(way);
    lanes.take_over(all(&names), |topic| (way.borrow_mut())(topic), unknown());
    let of_small = 700;
    let tenant = |to| {
        Some(if to == To::Member(of_small) {
            small
        } else {
            large
        })
    };
    for _ in 0..20 {
        let asked = turn(&mut lanes, 500, tenant);
        assert_eq!(asked.len(), MOST_LANES);
        let known = lanes
            .lanes
            .iter()
            .find(|one| one.to == To::Member(of_small));
        let stream = &known.expect("its lane").stream;
        assert!(asked.iter().any(|lane| lane.stream == *stream));
    }
}

#[test]
fn a_new_topic_is_asked_before_thousands_that_were_drained() {
    let names: Vec<String> = (0..1000).map(|n| format!("t{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut lanes = lanes(&names, &[]);
    for _ in 0..1000 {
        let asked = turn(&mut lanes, 10, |_| None);
        if asked.is_empty() {
            break;
        }
        lanes.learn(&asked, &brought(Duration::ZERO), unknown());
    }
    lanes.begin_look();
    let new = SeenStreams {
        is_all: false,
        ..all(&["new"])
    };
    lanes.take_over(new, |_| To::Bulkhead(0), unknown());
    let mut ask = || turn(&mut lanes, 10, |_| None);
    let mut asked = ask();
    asked.extend(ask());
    assert!(asked.iter().any(|lane| lane.stream == stream("new")));
}

/// Lanes with a backlog are always left.
#[test]
fn every_lane_has_its_turn_however_long_the_backlogs_are() {
    for (count, room, tenants) in [
        (64, 500, 0),
        (100, 500, 0),
        (128, 10, 0),
        (128, 500, 2),
        (300, 20, 3),
    ] {
        let mut lanes = lanes_of_members(count);
        let tenant = |to| match to {
            To::Member(number) if tenants > 0 => {
                Some(Uuid::from_u128(u128::from(number * tenants / (count + 1))))
            }
            _ => None,
        };
        let mut asked = HashSet::new();
        for _ in 0..count {
            let lanes = turn(&mut lanes, room, tenant);
            asked.extend(lanes.into_iter().map(|lane| lane.stream));
        }
        assert_eq!(asked.len(), lanes.lanes.len(), "{count} {room} {tenants}");
    }
}

/// Lanes with a backlog are always left.
#[test]
fn lanes_of_no_tenant_keep_no_tenant_from_its_turn() {
    let mut lanes = lanes_of_members(200);
    let tenant = |to| (to == To::Member(150)).then(|| Uuid::from_u128(1));
    let of_tenant = lanes.lanes.iter().find(|one| one.to == To::Member(150));
    let stream = of_tenant.expect("its lane").stream.clone();
    let asked = (0..40).filter(|_| {
        let asked = turn(&mut lanes, 10, tenant);
        asked.iter().any(|lane| lane.stream == stream)
    });
    assert!(asked.count() > 0);
}

#[test]
fn a_bulkhead_without_room_and_a_paused_topic_are_not_asked() {
    let mut config = Config::default();
    for name in ["a", "b"] {
        config
            .destinations
            .push(Destination::new(name, "http://a").expect("a URL"));
        config.routes.push(Route::new(name, name));
    }
    config.routes.push(Route::to_each("both", ["a", "b"]));
    let mut lanes = Lanes::default();
    let seen = all(&["a", "b", "both", "neither"]);
    lanes.take_over(seen, by(&config), unknown());
    lanes.keep_back(&Arc::new(KeptBack {
        topics: HashSet::from(["b".to_owned()]),
        ..KeptBack::default()
    }));
    let room = |group| match group {
        Group::Only(To::Bulkhead(0)) => 0,
        _ => 10,
    };
    let asked = lanes.allot(unknown(), room, |_| None, false);
    let mut asked: Vec<&str> = asked
        .iter()
        .map(|lane| lane.stream.topic.topic.as_str())
        .collect();
    asked.sort_unstable();
    assert_eq!(asked, ["both", "neither"]);
    assert!(lanes.is_anything_left(unknown(), |_| true));
}

#[test]
fn a_lane_continues_at_its_floor_and_is_swept_now_and_then() {
    let now = at(1_000_000_000);
    let found = all(&["a"]).found.remove(0);
    let mut state = LaneState::new(found, To::Bulkhead(0), now, None, 0);
    assert!(
        state.is_sweep_due(now.here, false),
        "the lane was never swept"
    );
    let last = Position {
        available_at: 1_000_000_000,
        sequence: 7,
    };
    state.learn(
        Position::START,
        true,
        Some(last),
        &brought(Duration::from_millis(1)),
        now,
    );
    assert_eq!((state.floor, state.is_done), (last, false));
    assert!(
        !state.is_sweep_due(now.here, false),
        "the lane has more behind its floor"
    );
    // No more messages there: the lane is claimed once more from a little earlier, for messages committed meanwhile.
    state.learn(last, false, None, &brought(Duration::ZERO), now);
    assert!(state.floor < last && !state.is_done && state.is_quiet);
    let floor = state.floor;
    state.learn(floor, false, None, &brought(Duration::ZERO), now);
    assert!(state.is_done && !state.is_swept_in_look);
    assert!(state.is_sweep_due(now.here, true), "the application asks");
    let an_hour = Duration::from_secs(3600);
    let mut sweeps = || state.learn(Position::START, false, None, &brought(an_hour), now);
    sweeps();
    sweeps();
    assert!(state.is_done && state.is_swept_in_look);
    assert!(
        !state.is_sweep_due(now.here + an_hour, true),
        "sweeps that take long are not repeated soon, even if the application asks"
    );
    let a_day = REST * an_hour;
    assert!(state.is_sweep_due(now.here + a_day, true));
}

/// R9: a claim does not see messages committed after it began, and the next sweep, which would find them, may be far
/// off.
#[test]
fn a_claim_that_took_long_passes_nothing_that_came_meanwhile() {
    let mut lanes = lanes(&["a"], &[]);
    let now = at(100_000_000);
    let sweep = lanes.allot(now, |_| 10, |_| None, false);
    lanes.learn(&sweep, &brought(Duration::from_secs(1)), now);
    lanes.begin_look();
    let asked = lanes.allot(now, |_| 10, |_| None, false);
    let took = Duration::from_secs(5);
    lanes.learn(&asked, &brought(took), after(now, took));
    lanes.begin_look();
    let next = lanes.allot(now, |_| 10, |_| None, false);
    assert_eq!(next[0].after, now.recently(OVERLAP));
}

#[test]
fn a_released_message_is_claimed_from_its_time_on_without_a_sweep() {
    let mut lanes = lanes(&["a", "b"], &[]);
    let last = Position {
        available_at: 1_000,
        sequence: 7,
    };
    for lane in &mut lanes.lanes {
        lane.floor = last;
        lane.swept = LastTwo::slow(Last {
            ended: Instant::now(),
            took: Duration::from_secs(1),
        });
        lane.is_done = true;
    }
    let topic = |name: &str| stream(name).topic;
    let here = Instant::now();
    let to = lanes.lanes[0].to;
    let go_back = |lanes: &mut Lanes, topics: &[(&str, i64)]| {
        let topics = topics.iter().map(|(name, at)| (topic(name), *at)).collect();
        lanes.go_back(&topics, |_| to, here);
    };
    go_back(&mut lanes, &[("a", 900)]);
    let after = |lanes: &mut Lanes| -> Vec<Position> {
        let mut asked = turn(lanes, 10, |_| None);
        asked.sort_by_key(|lane| lane.stream.topic.topic.clone());
        asked.iter().map(|lane| lane.after).collect()
    };
    assert_eq!(after(&mut lanes), [Position::of_time(900), last]);
    // Messages later than the floor are found anyway.
    go_back(&mut lanes, &[("b", 2_000)]);
    assert_eq!(after(&mut lanes), [Position::of_time(900), last]);
    // A topic that has no lane gets one.
    go_back(&mut lanes, &[("c", 1)]);
    let all = [Position::of_time(900), last, Position::START];
    assert_eq!(after(&mut lanes), all);
}

/// R65: each claim reads all lanes, so a hundred thousand that are empty would delay every other topic.
#[test]
fn of_many_lanes_the_empty_ones_are_forgotten_after_a_claim() {
    let names: Vec<String> = (0..MOST_KEPT + 500).map(|n| format!("t{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (mut lanes, now) = (lanes(&names, &[]), at(1_000_000));
    let later = Topic::new("t0", "");
    lanes.lanes[0].first = 2_000_000;
    let mut claims = 0;
    while lanes.lanes.len() > MOST_KEPT {
        let asked = lanes.allot(now, |_| 500, |_| None, false);
        lanes.learn(&asked, &brought(Duration::ZERO), now);
        claims += 1;
        assert!(claims < 100, "{} lanes are left", lanes.lanes.len());
    }
    let is_later = |lane: &LaneState| lane.stream.topic == later;
    assert!(lanes.lanes.iter().any(is_later), "its message is due later");
    let kept = lanes.lanes.len();
    while !lanes.allot(now, |_| 500, |_| None, false).is_empty() {
        let asked = lanes.allot(now, |_| 500, |_| None, false);
        lanes.learn(&asked, &brought(Duration::ZERO), now);
    }
    assert_eq!(lanes.lanes.len(), kept, "these are few");
}

#[test]
fn streams_that_are_found_beside_the_known_ones_begin_where_they_have_something() {
    let mut lanes = lanes(&["a"], &[]);
    lanes.lanes[0].floor = Position::of_time(5);
    lanes.lanes[0].swept = LastTwo::slow(Last {
        ended: Instant::now(),
        took: Duration::from_secs(1),
    });
    let first = Position {
        available_at: 1_000,
        sequence: 7,
    };
    let beside = SeenStreams {
        found: vec![FoundStream {
            stream: stream("b"),
            first,
        }],
        is_all: false,
        slow: Some(Duration::from_secs(1)),
    };
    let config = Config::default();
    let now = at(10_000_000);
    lanes.take_over(beside, by(&config), now);
    let mut asked = lanes.allot(now, |_| 10, |_| None, false);
    asked.sort_by_key(|lane| lane.after);
    let places: Vec<(&str, Position)> = asked
        .iter()
        .map(|lane| (lane.stream.topic.topic.as_str(), lane.after))
        .collect();
    let expected = [("a", Position::of_time(5)), ("b", Position::of_time(1_000))];
    assert_eq!(places, expected);
    // The survey found all lanes: "a" is empty, and is forgotten after a while.
    let nowhere = config.clone();
    lanes.take_over(all(&["b"]), by(&nowhere), now);
    assert_eq!(lanes.streams(), ["a", "b"].map(stream));
    lanes.take_over(all(&["b"]), by(&nowhere), long_after(now));
    assert_eq!(lanes.streams(), [stream("b")]);
    assert_eq!(lanes.lanes[0].floor, Position::of_time(1_000));
}

/// The way of each topic by the routes of these settings.
fn by(config: &Config) -> impl Fn(&Topic) -> To {
    let roster = Configured::new(Arc::new(Routes::new(config)), None);
    move |topic| roster.way(topic)
}

#[test]
fn a_slow_look_forgets_no_stream_and_none_is_there_twice() {
    let mut lanes = lanes(&["a", "b"], &[]);
    let nowhere = Config::default();
    let slow = |topics: &[&str], is_all| SeenStreams {
        is_all,
        slow: Some(Duration::from_secs(1)),
        ..all(topics)
    };
    lanes.take_over(slow(&["b", "c"], true), by(&nowhere), unknown());
    lanes.take_over(slow(&["a", "d", "d"], false), by(&nowhere), unknown());
    assert_eq!(lanes.streams(), ["a", "b", "c", "d"].map(stream));
    lanes.take_over(all(&["d", "a"]), by(&nowhere), long_after(unknown()));
    assert_eq!(lanes.streams(), ["a", "d"].map(stream));
}

/// A time by which empty lanes are forgotten.
fn long_after(now: Now) -> Now {
    after(now, EMPTY_KEPT + Duration::from_secs(1))
}

/// A message of a topic that was just delivered must not wait for the next survey.
#[test]
fn a_lane_that_has_just_become_empty_is_asked_with_the_next_claim() {
    let mut lanes = lanes(&["backlog", "quick"], &[]);
    let config = Config::default();
    let now = unknown();
    lanes.take_over(all(&["backlog"]), by(&config), now);
    let asked = lanes.allot(now, |_| 10, |_| None, false);
    assert!(asked.iter().any(|lane| lane.stream == stream("quick")));
}

#[test]
fn a_stream_whose_first_message_is_due_later_begins_with_what_comes_before() {
    let mut lanes = Lanes::default();
    let now = at(10_000_000);
    let mut seen = all(&["a"]);
    seen.slow = Some(Duration::from_secs(1));
    seen.found[0].first = Position::of_time(3_600_000_000);
    lanes.take_over(seen, by(&Config::default()), now);
    let asked = lanes.allot(now, |_| 10, |_| None, false);
    assert!(asked[0].after < Position::of_time(10_000_000));
}

/// G5: a sweep finds the messages that another relay released, and the relay must not sleep past the sweep's time.
#[test]
fn a_sweep_that_a_look_has_left_out_is_owed() {
    let mut lanes = lanes(&["a"], &[]);
    let took = Duration::from_secs(1);
    let now = at(0);
    let sweep = lanes.allot(now, |_| 10, |_| None, false);
    assert_eq!(sweep, [lane("a", 10)]);
    lanes.learn(&sweep, &brought(took), now);
    lanes.learn(&sweep, &brought(took), now);
    let look = now.here;
    assert_eq!(lanes.owed_at(look, |_| true), None, "the sweep was made");
    lanes.begin_look();
    let asked = lanes.allot(now, |_| 10, |_| None, false);
    assert!(
        asked[0].after > Position::START,
        "too soon for another sweep"
    );
    lanes.learn(&asked, &brought(Duration::ZERO), now);
    let owed = lanes.owed_at(look, |_| true).expect("an owed sweep");
    assert_eq!(owed, now.here + REST * took);
    let none = lanes.owed_at(look, |_| false);
    assert_eq!(none, None, "the lane is not claimed");
    let later = owed + Duration::from_millis(1);
    let none = lanes.owed_at(later, |_| true);
    assert_eq!(none, None, "a later look had no room for the sweep");
}

/// G5: a keyed message that another relay released lies before the lane's floor, and a walk past a hundred thousand
/// keys that are not due takes many seconds.
#[test]
fn keyed_lanes_are_swept_each_second() {
    let mut lanes = lanes(&["a"], &[]);
    let keyed = Stream {
        is_keyed: true,
        ..stream("a")
    };
    lanes.lanes[0].stream = keyed.clone();
    let now = at(0);
    let sweep = lanes.allot(now, |_| 10, |_| None, false);
    assert_eq!(sweep[0].after, Position::START);
    // The claim has reached the end of the keyed messages that it reads; the walk covers the rest.
    let floor = lanes.lanes[0].floor;
    let reached = HashMap::from([(keyed, Position::of_time(1))]);
    let full = Brought {
        reached: &reached,
        ..brought(Duration::ZERO)
    };
    lanes.learn(&sweep, &full, now);
    assert_eq!(lanes.lanes[0].floor, floor, "the floor stays");
    let next = lanes.allot(now, |_| 10, |_| None, false);
    assert_eq!(next[0].after, floor, "the lane was swept just now");
    lanes.learn(&next, &brought(Duration::ZERO), now);
    lanes.begin_look();
    let later = after(now, SWEEPS.interval);
    let next = lanes.allot(later, |_| 10, |_| None, false);
    assert_eq!(next[0].after, Position::START);
}

/// R46: thousands of lanes that only wait for next attempts cost a claim nothing.
#[test]
fn a_lane_of_a_member_is_asked_when_its_first_message_is_due() {
    let mut lanes = Lanes::default();
    let seen = |first| {
        let mut seen = all(&["a"]);
        seen.found[0].first = Position::of_time(first);
        seen
    };
    let registered = |_: &Topic| To::Member(1);
    lanes.take_over(seen(2_000_000), registered, at(1_000_000));
    let early = at(1_000_001);
    assert_eq!(lanes.allot(early, |_| 10, |_| None, false), []);
    assert!(!lanes.is_anything_left(early, |_| true));
    assert_eq!(
        lanes.allot(early, |_| 10, |_| None, true).len(),
        1,
        "the application asks"
    );
    assert_eq!(
        lanes.allot(at(2_000_000), |_| 10, |_| None, false).len(),
        1,
        "the message is due"
    );
    let released = HashMap::from([(stream("a").topic, 1_000_000)]);
    lanes.go_back(&released, registered, Instant::now());
    assert_eq!(
        lanes.allot(early, |_| 10, |_| None, false).len(),
        1,
        "a message was released"
    );
    lanes.take_over(seen(2_000_000), registered, early);
    assert_eq!(lanes.allot(early, |_| 10, |_| None, false), []);
    let later = after(early, LOOK_IS_GOOD);
    assert_eq!(
        lanes.allot(later, |_| 10, |_| None, false).len(),
        1,
        "the survey is too old"
    );
    let others = |_: &Topic| To::Bulkhead(0);
    lanes.go_elsewhere(others);
    assert_eq!(
        lanes.allot(early, |_| 10, |_| None, false).len(),
        1,
        "configured destinations may get messages at any time"
    );
}
