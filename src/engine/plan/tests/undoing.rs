//! What may have been lost is undone: before anything else, and while claims continue.

use super::*;

#[test]
fn a_question_waits_for_the_end_of_an_undo() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[]);
    let doubt = doubt(1);
    ground.view.custody.doubt = Some(doubt.clone());
    assert_eq!(ground.step(), Step::Undo(Undo::Look(doubt.clone())));
    ground.planner.looked(ground.now, AtWork::No, i64::MAX);
    for _ in 0..3 {
        assert_eq!(ground.step(), Step::LookAgain);
        let again = ground.planner.look_again(ground.now, &ground.view);
        assert_eq!(again, Step::Again, "the planner does not wait");
        ground.part();
    }
}

/// R13, R65: the messages of a claim without an answer are released, and claims go on, whatever is in flight.
#[test]
fn an_undo_begins_at_once_and_claims_continue_meanwhile() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    let doubt = doubt(1);
    ground.view.custody.doubt = Some(doubt.clone());
    ground.view.custody.is_nothing_in_flight = false;
    assert_eq!(ground.next(), Step::Undo(Undo::Look(doubt.clone())));
    ground.planner.looked(ground.now, AtWork::No, i64::MAX);
    assert!(matches!(ground.step(), Step::Claim { .. }));
    let mut after = i64::MIN;
    let released = loop {
        let part = match ground.step() {
            Step::Undo(Undo::Part(part)) => part,
            Step::Undo(Undo::End {
                doubt: of,
                released,
            }) => {
                assert_eq!(of, doubt);
                break released;
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(part.after, after);
        after = part.upto;
        let (now, took) = (ground.now, Duration::ZERO);
        ground.planner.undone(now, part, released(1), took);
        if part.upto < i64::MAX {
            assert!(matches!(ground.step(), Step::Claim { .. }));
        } else {
            ground.planner.stage = RoundStage::Undo;
        }
    };
    assert!(released.is_some_and(|count| count > 3));
    ground.view.custody.doubt = None;
    assert!(
        matches!(ground.step(), Step::Survey(_)),
        "a new look begins"
    );
}

/// R65: a server process that is still working, or a message that a person has locked, lets the relay look again later,
/// and only later.
#[test]
fn an_undo_is_repeated_while_something_may_be_left() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[]);
    let doubt = doubt(1);
    ground.view.custody.doubt = Some(doubt.clone());
    let look = Step::Undo(Undo::Look(doubt.clone()));
    assert_eq!(ground.step(), look);
    ground.planner.looked(ground.now, AtWork::Yes, i64::MAX);
    assert_ne!(
        ground.step(),
        look,
        "the process is not asked for again at once"
    );
    ground.planner.stage = RoundStage::Undo;
    ground.now += Duration::from_millis(50);
    assert_eq!(ground.step(), look);
    // A process that exists for long has lost its client: what it has committed is released.
    ground.now += Duration::from_secs(3);
    ground.planner.looked(ground.now, AtWork::Yes, i64::MAX);
    ground.planner.stage = RoundStage::Undo;
    ground.undo_all(released(2));
    ground.planner.stage = RoundStage::Undo;
    assert!(!matches!(ground.step(), Step::Undo(_)), "the undo rests");
    ground.now += Duration::from_secs(1);
    ground.planner.stage = RoundStage::Undo;
    assert_eq!(ground.step(), look);
    ground.planner.looked(ground.now, AtWork::No, i64::MAX);
    ground.planner.stage = RoundStage::Undo;
    let locked = Some(Released {
        messages: 0,
        are_some_locked: true,
    });
    let last = ground.undo_all(locked);
    for _ in 0..20 {
        ground.planner.stage = RoundStage::Undo;
        assert!(!matches!(ground.step(), Step::Undo(_)), "the undo rests");
        ground.now += Duration::from_secs(10);
        ground.planner.stage = RoundStage::Undo;
        assert_eq!(ground.undo_all(locked), last);
    }
    ground.now += Duration::from_secs(10);
    ground.planner.stage = RoundStage::Undo;
    ground.undo_all(released(1));
    ground.planner.stage = RoundStage::Undo;
    let released = Some(3);
    assert_eq!(ground.step(), Step::Undo(Undo::End { doubt, released }));
}

/// R65: a relay that has much else to do makes a pass of short statements in many seconds. Only the statements count:
/// their multiple is waited for.
#[test]
fn locked_messages_are_released_soon_although_the_pass_took_long() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[]);
    ground.view.custody.doubt = Some(doubt(1));
    assert!(matches!(ground.step(), Step::Undo(Undo::Look(_))));
    ground.planner.looked(ground.now, AtWork::No, i64::MAX);
    ground.planner.stage = RoundStage::Undo;
    let took = Duration::from_millis(4);
    let last = loop {
        let part = ground.part();
        let are_some_locked = part.has(1);
        let released = Some(Released {
            messages: 0,
            are_some_locked,
        });
        ground.now += Duration::from_secs(1);
        ground.planner.undone(ground.now, part, released, took);
        ground.planner.stage = RoundStage::Undo;
        if part.upto == i64::MAX {
            break part;
        }
    };
    assert!(last.after > 1);
    ground.now += 20 * took;
    let again = ground.part();
    assert!(again.has(1), "{again:?}");
    ground.planner.undone(ground.now, again, released(1), took);
    ground.planner.stage = RoundStage::Undo;
    assert!(matches!(ground.step(), Step::Undo(Undo::End { .. })));
}

/// R65: a wait ends when the undo continues. Nobody else would wake the claimer.
#[test]
fn a_wait_during_an_undo_ends_with_its_next_step() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[]);
    ground.view.custody.question = 1;
    ground.view.custody.doubt = Some(doubt(1));
    assert!(matches!(ground.step(), Step::Undo(Undo::Look(_))));
    ground.planner.looked(ground.now, AtWork::Yes, i64::MAX);
    let wait = ground.wait();
    assert_eq!(wait.until, ground.now + Duration::from_millis(50));
    assert_eq!(wait.answers, None, "something is in doubt");
}

/// R13: the messages of that claim may be in ranges that the undo has passed.
#[test]
fn an_undo_restarts_when_another_answer_is_lost() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[]);
    ground.view.custody.doubt = Some(doubt(1));
    assert!(matches!(ground.step(), Step::Undo(Undo::Look(_))));
    ground.planner.looked(ground.now, AtWork::No, i64::MAX);
    ground.planner.stage = RoundStage::Undo;
    let part = ground.part();
    let (now, took) = (ground.now, Duration::ZERO);
    ground.planner.undone(now, part, released(0), took);
    let another = doubt(2);
    ground.view.custody.doubt = Some(another.clone());
    ground.planner.stage = RoundStage::Undo;
    assert_eq!(ground.step(), Step::Undo(Undo::Look(another)));
    ground.planner.looked(ground.now, AtWork::No, i64::MAX);
    ground.planner.stage = RoundStage::Undo;
    assert_eq!(ground.part(), part);
}

#[test]
fn a_doubt_about_an_ended_lease_ends_at_once() {
    let routes = routes();
    let mut ground = Ground::new(&routes);
    let doubt = Doubt {
        lease: LeaseId(LEASE.0 - 1),
        ..doubt(1)
    };
    ground.view.custody.doubt = Some(doubt.clone());
    let released = None;
    assert_eq!(ground.next(), Step::Undo(Undo::End { doubt, released }));
}

/// R12, R14: messages of an expired lease are taken over, except those that this process still has to settle.
#[test]
fn leases_that_have_ended_are_taken_over_or_lost() {
    let routes = routes();
    let mut ground = Ground::with(&routes, &[stream("a", false)]);
    // The row of a lease may be gone while this process still holds its messages.
    ground.planner.hear(Report::Vanished(vec![4, 5]));
    ground.now += surveys::INTERVAL;
    let ended = |ended: &[i64]| Surveyed {
        streams: found(&[stream("a", false)]),
        ended: ended.to_vec(),
        is_active: true,
        ..nothing()
    };
    ground.held = [LeaseId(2), LeaseId(5)].into();
    ground.surveyed(ended(&[1, 2]));
    assert_eq!(ground.planner.expired(), [1, 4]);
    let Step::Claim { plain, .. } = ground.step() else {
        panic!("expected a takeover");
    };
    assert_eq!(plain[0].after, Position::START, "the lane is swept");
    ground.now += surveys::INTERVAL;
    ground.surveyed(ended(&[1, 2, LEASE.0]));
    assert_eq!(ground.step(), Step::LoseLease(LEASE));
}
