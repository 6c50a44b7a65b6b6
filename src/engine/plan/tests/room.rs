//! Claims wait for room: of destinations, of keys, and of time.

use super::*;

/// A sender rings only while its flag is set. A sender that made room before did not ring.
#[test]
fn room_that_was_made_before_the_flags_were_up_is_seen() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    ground.view.doors[0].room = 0;
    assert_eq!(ground.step(), Step::LookAgain);
    let mut before = ground.view.clone();
    before.doors[0].room = 1;
    let again = ground.planner.look_again(ground.now, &before);
    assert_eq!(again, Step::Again);
    let wait = ground.wait();
    assert_eq!(wait.what, Awaited::Room);
    ground.view.doors[0].room = 1;
    ground.planner.waited(ground.now, wait.what, true, true);
    assert!(matches!(ground.step(), Step::Claim { .. }));
}

#[test]
fn keys_that_were_freed_while_the_flags_were_raised_are_looked_at() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", true)]);
    assert_eq!(ground.wait().what, Awaited::Work);
    let returned = Returned {
        keys: [key("k")].into(),
        ..Returned::default()
    };
    assert_eq!(ground.step(), Step::LookAgain);
    ground.planner.hear(Report::Returned(returned));
    let again = ground.planner.look_again(ground.now, &ground.view);
    assert_eq!(again, Step::Again);
    assert_eq!(ground.step(), keys(&["k"]));
}

#[test]
fn topics_without_a_place_are_full_until_there_is_room() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", true)]);
    assert!(ground.planner.take_policy().is_some());
    assert_eq!(ground.planner.take_policy(), None, "nothing has changed");
    ground.view.doors[0].room = 0;
    ground
        .planner
        .hear(Report::NoPlace("a".to_owned(), To::Bulkhead(0)));
    ground
        .planner
        .hear(Report::NoPlace("a".to_owned(), To::Bulkhead(0)));
    let policy = ground.planner.take_policy().expect("the topic is full");
    assert_eq!(policy.full, ["a"]);
    assert_eq!(ground.step(), Step::LookAgain);
    assert_eq!(ground.planner.take_policy(), None, "there is no room");
    ground.view.doors[0].room = 1;
    ground.step();
    let policy = ground.planner.take_policy().expect("the topic has room");
    assert!(policy.full.is_empty());
}

/// G5: freed keys without room wait for it and are not forgotten.
#[test]
fn keys_without_room_wait_for_it() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", true), stream("b", true)]);
    assert_eq!(ground.wait().what, Awaited::Work);
    ground.planner.hear(Report::Returned(Returned {
        keys: [key("k")].into(),
        ..Returned::default()
    }));
    ground.view.doors[0].room = 0;
    let found = |ground: &mut Ground<'_>, claims| {
        let ask = ground.asks_for_keys();
        assert_eq!(ask, Ask::Keys(vec![key("k")]));
        ground.found(ask, head("a", 1), claims)
    };
    assert!(found(&mut ground, Claims::default()).is_empty());
    let wait = ground.wait();
    assert_eq!((wait.what, wait.answers), (Awaited::Room, None));
    ground.view.doors[0].room = 1;
    // A claim that leaves the message out because of its size.
    let cut = Claims {
        is_cut: true,
        ..Claims::default()
    };
    assert_eq!(found(&mut ground, cut), [1]);
    let is_looked_at = |ground: &mut Ground<'_>| ground.step() == keys(&["k"]);
    assert!((0..3).any(|_| is_looked_at(&mut ground)));
}

/// R14: only a walk finds these keys, and a walk may have begun just before.
#[test]
fn freed_keys_wait_for_their_destination_to_open_and_walks_for_topics_that_are_resumed() {
    let routes = routes();
    let keyed = stream("a", true);
    let mut ground = Ground::with(&routes, std::slice::from_ref(&keyed));
    assert_eq!(ground.wait().what, Awaited::Work);
    ground.planner.hear(Report::Returned(Returned {
        keys: [key("k")].into(),
        ..Returned::default()
    }));
    let ask = ground.asks_for_keys();
    let closed = Door {
        room: 0,
        is_open: false,
        opens_at: None,
    };
    let open = std::mem::replace(&mut ground.view.doors[0], closed);
    ground.found(ask, head("a", 1), Claims::default());
    assert_eq!(
        ground.wait().what,
        Awaited::Work,
        "the planner does not spin"
    );
    ground.view.doors[0] = open;
    let ask = ground.asks_for_keys();
    ground.found(ask, Page::default(), Claims::default());
    assert_eq!(ground.wait().what, Awaited::Work);
    let asks_for_walk = |ground: &mut Ground<'_>| {
        let pass = SearchPass {
            is_idle: false,
            ..ground.planner.pass(ground.now, &ground.view, true)
        };
        // Every other turn.
        let walk = &mut ground.planner.searches.walk;
        (0..2).any(|_| walk.ask(&pass).is_some())
    };
    for topics in [vec!["a".to_owned()], vec![]] {
        assert!(!asks_for_walk(&mut ground));
        ground.view.custody.kept_back = Arc::new(KeptBack {
            topics: topics.into_iter().collect(),
            ..KeptBack::default()
        });
        ground.step();
    }
    assert!(asks_for_walk(&mut ground));
}

/// R11
#[test]
fn a_limit_ends_claims_and_answers() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    ground.view.left_to_claim = Some(2);
    let Step::Claim { room, .. } = ground.step() else {
        panic!("expected a claim");
    };
    assert_eq!(room, 2);
    ground.view.left_to_claim = Some(0);
    ground.view.custody.is_nothing_in_flight = false;
    assert_eq!(ground.wait().answers, None);
    ground.view.custody.is_nothing_in_flight = true;
    let wait = ground.wait();
    assert_eq!((wait.what, wait.answers), (Awaited::Work, Some(0)));
}

/// R9: after a slow claim, messages are searched in ranges.
#[test]
fn a_slow_search_is_left_to_the_patrol() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    let Step::Claim { plain, .. } = ground.step() else {
        panic!("expected a claim");
    };
    ground
        .planner
        .claim_was_too_slow(ground.now, &plain, SECOND);
    let mut ranges: Vec<Range> = Vec::new();
    for _ in 0..1000 {
        match ground.step() {
            Step::Search(Ask::Range(range)) => {
                ranges.push(range);
                ground.found(Ask::Range(range), Page::default(), Claims::default());
            }
            Step::Claim { plain, .. } => ground.bring(&plain, vec![]),
            Step::LookAgain => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(ranges.last().map(|range| range.upto), Some(i64::MAX));
    // The next round begins after a second, before the next poll.
    assert_eq!(ground.wait().until, ground.now + SECOND);
}

/// The planner does not wake up for queries that no lane needs.
#[test]
fn a_relay_of_an_empty_outbox_sleeps_until_the_next_poll() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[]);
    for _ in 0..2 {
        let wait = ground.wait();
        assert_eq!((wait.what, wait.until), (Awaited::Work, ground.now + POLL));
        assert!(wait.is_poll);
        ground.now += POLL;
        ground
            .planner
            .waited(ground.now, Awaited::Work, false, true);
        ground.survey(&[]);
    }
}

/// R9, found by the simulation (seed 7908): slow queries are made less often, even if the process itself stood still.
/// Late messages must still be found in time.
#[test]
fn a_process_that_stood_still_looks_for_late_commits_soon() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    let ask = ground.asks_for_late();
    ground.found_late(ask, &[], 9 * SECOND);
    ground
        .planner
        .waited(ground.now + SECOND, Awaited::Work, true, true);
    let wait = ground.wait();
    assert!(wait.until <= ground.now + 6 * SECOND);
    assert!(!wait.is_poll, "a query is owed before the poll");
}

/// R6
#[test]
fn expired_messages_are_searched_for_in_topics_that_no_relay_serves() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[]);
    let unserved = vec![topic("a"), topic("c")];
    ground.planner.hear(Report::Unserved(unserved));
    let mut seen = Vec::new();
    while let Step::Search(ask @ Ask::Expired(..)) = ground.step() {
        let Ask::Expired(stream, Position::START) = &ask else {
            panic!("{ask:?}");
        };
        seen.push(stream.clone());
        ground.found(ask, Page::default(), Claims::default());
        ground.now += SECOND / 10;
    }
    let expected = [false, true].map(|is_keyed| stream("c", is_keyed));
    assert_eq!(seen, expected, "topic `a` is served here");
}

/// R8, G5: claims have passed the message's position, and neither a walk nor a sweep is due.
#[test]
fn a_message_committed_late_is_claimed_next() {
    let routes = routes();
    let (plain, keyed) = (stream("a", false), stream("b", true));
    let mut ground = Ground::with(&routes, &[plain.clone(), keyed.clone()]);
    let surveyed = Surveyed {
        streams: found(&[plain, keyed]),
        is_active: true,
        time: 60_000_000,
        ..nothing()
    };
    ground.planner.surveys.want();
    ground.surveyed(surveyed);
    ground.wait();
    let one = |sequence, topic: &str, ordering_key: Option<&str>| Free {
        sequence,
        topic: topic.to_owned(),
        destination: String::new(),
        ordering_key: ordering_key.map(str::to_owned),
        available_at: diesel::pg::data_types::PgTimestamp(10_000_000 + sequence),
        registration: None,
    };
    let found = [one(1, "a", None), one(2, "a", None), one(3, "b", Some("k"))];
    ground.now += SECOND / 5;
    let ask = ground.asks_for_late();
    ground.found_late(ask, &found, Duration::from_millis(1));
    let ask = ground.asks_for_keys();
    assert_eq!(ask, Ask::Keys(vec![key("k")]));
    ground.found(ask, Page::default(), Claims::default());
    let Step::Claim { plain, .. } = ground.step() else {
        panic!("expected a claim");
    };
    let first = Position::of_time(10_000_001);
    assert_eq!(plain[0].after, first, "the floor is lowered");
}
