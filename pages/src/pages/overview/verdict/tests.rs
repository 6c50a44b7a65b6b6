use super::*;

fn verdict(facts: Facts<'_>) -> Verdict {
    Verdict::from_facts(facts)
}

fn working<'a>() -> Facts<'a> {
    Facts {
        has_relay: true,
        ..Facts::default()
    }
}

#[test]
fn a_relay_that_is_switched_off_is_named() {
    let off = verdict(Facts {
        waiting: 2,
        switched_off: Some("host/7"),
        ..Facts::default()
    });
    assert_eq!(off.state, State::Stopped);
    assert!(off.sentence.starts_with("The relay is switched off"));
    let named = |reason: &String| reason.contains("host/7") && reason.contains("OUTBOX_ENABLED");
    assert!(off.reasons.iter().any(named), "{:?}", off.reasons);
}

#[test]
fn without_a_relay_nothing_flows() {
    let alone = verdict(Facts {
        waiting: 2,
        ..Facts::default()
    });
    assert_eq!(alone.state, State::Stopped);
    assert!(
        alone.sentence.contains("2 messages are waiting"),
        "{}",
        alone.sentence
    );
    assert_eq!(verdict(Facts::default()).state, State::Stopped);
}

#[test]
fn late_topics_come_before_topics_that_flow() {
    let late = verdict(Facts {
        oldest_due: Some((200.0, "order.paid".to_owned())),
        waiting: 7,
        ..working()
    });
    assert_eq!(late.state, State::Waits);
    assert_eq!(
        late.sentence,
        "Delayed: a message has been due for 3 min 20 s."
    );
    assert!(late.reasons[0].contains("order.paid"));
}

#[test]
fn a_topic_whose_messages_are_all_dead_lettered_is_reported() {
    let dying = verdict(Facts {
        all_dead_letters: true,
        ..working()
    });
    assert_eq!(dying.state, State::Waits);
}

#[test]
fn a_late_topic_names_the_busy_threads() {
    let late = || Facts {
        oldest_due: Some((200.0, "order.paid".to_owned())),
        ..working()
    };
    let reasons = verdict(late()).reasons;
    assert!(reasons[1].contains("no key is blocked"), "{reasons:?}");
    let reasons = verdict(Facts {
        busy: vec!["billing".to_owned()],
        ..late()
    })
    .reasons;
    assert!(reasons[1].contains("threads of billing"), "{reasons:?}");
}

#[test]
fn the_relays_own_failures_come_first() {
    let failed = verdict(Facts {
        failures: vec!["the claimer hangs".to_owned()],
        ..working()
    });
    assert_eq!(
        (failed.state, failed.reasons[0].as_str()),
        (State::Stopped, "the claimer hangs")
    );
}

#[test]
fn a_topic_whose_sends_all_fail_is_not_idle() {
    let failing = verdict(Facts {
        waiting: 3,
        retrying: 3,
        ..working()
    });
    assert_eq!(failing.state, State::Waits);
    assert_eq!(
        failing.reasons,
        ["3 messages are waiting for a retry after a failed attempt."]
    );
}

#[test]
fn idle_is_when_nothing_is_due() {
    assert_eq!(verdict(working()).state, State::Idle);
    let delayed = verdict(Facts {
        waiting: 1,
        ..working()
    });
    assert_eq!(
        delayed.sentence,
        "Idle: 1 message is waiting, none due yet."
    );
    let dead = verdict(Facts {
        dead: 3,
        ..working()
    });
    assert_eq!(dead.reasons, ["3 dead letters need review."]);
    let moving = verdict(Facts {
        waiting: 5,
        oldest_due: Some((0.1, "order.paid".to_owned())),
        ..working()
    });
    assert_eq!(moving.state, State::Flowing);
}

#[test]
fn without_a_database_it_says_so() {
    let blind = Verdict::blind("connection refused", None, &Facts::default());
    assert_eq!(blind.state, State::Stopped);
    assert_eq!(blind.reasons, ["Error: connection refused"]);
}

/// R58: customers' endpoints fail beside messages that flow.
#[test]
fn failing_and_disabled_destinations_are_remarks_of_every_verdict() {
    let mut endpoints = EndpointCounts::default();
    (endpoints.failing, endpoints.unread, endpoints.disabled) = (2, 1, 1);
    let idle = verdict(Facts {
        endpoints,
        ..working()
    });
    assert_eq!(idle.state, State::Idle);
    assert_eq!(
        idle.reasons,
        [
            "2 endpoints are failing (see Endpoints).",
            "1 endpoint is unread (see Endpoints).",
            "1 endpoint is disabled (see Endpoints)."
        ]
    );
}
