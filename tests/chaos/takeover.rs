//! A dead relay's messages go to another relay within seconds; a living relay keeps its messages. With the default
//! lease of a minute.

use std::time::{Duration, Instant};

use crate::ground::{
    all_are_delivered, all_have_arrived, alone, attempts, duplicates, enqueue, leases_of, let_pass,
    lines_with, relay,
};
use crate::lost_answers::Proxy;
use crate::support::{Database, Gate, Receiver, Running, eventually};

/// The limit from the kill until everything is delivered.
const SOON: Duration = Duration::from_secs(12);
/// How long a living relay is away.
const AWAY: Duration = Duration::from_secs(5);
const MESSAGES: usize = 30;
/// The default of OUTBOX_CONCURRENCY: so many requests arrive, and no more.
const SENDERS: usize = 16;
/// The defaults of settings that other tests shorten.
const DEFAULTS: &[(&str, &str)] = &[("OUTBOX_LEASE", "60s"), ("OUTBOX_SEND_TIMEOUT", "2500ms")];
/// The longest timeout.
const PATIENT: &[(&str, &str)] = &[("OUTBOX_LEASE", "60s"), ("OUTBOX_SEND_TIMEOUT", "5m")];

/// A relay that holds all messages and is sending the first of them.
struct Scene {
    database: Database,
    first: Receiver,
    gate: Gate,
    second: Receiver,
    settings: &'static [(&'static str, &'static str)],
}

impl Scene {
    fn new() -> Self {
        let database = Database::new();
        let (first, gate) = Receiver::held();
        Self {
            database,
            first,
            gate,
            second: Receiver::ok(),
            settings: DEFAULTS,
        }
    }

    /// Starts the relay and waits until its messages can be taken over.
    fn begin(&self, proxy: Option<&Proxy>) -> Running {
        let command = relay(&self.database, &self.first, self.settings);
        let command = match proxy {
            Some(proxy) => proxy.between(&self.database, command),
            None => command,
        };
        let relay = Running::start(command);
        eventually("its session has the lease's lock", || {
            self.database
                .number("SELECT count(*) FROM {o}_lease WHERE takeover_after IS NOT NULL")
                == 1
        });
        enqueue(&self.database, 1, MESSAGES);
        self.first.wait_for(SENDERS);
        let held = i64::try_from(MESSAGES).expect("a small number");
        assert_eq!(self.database.count("sending"), held);
        relay
    }

    fn another(&self) -> Running {
        Running::start(relay(&self.database, &self.second, self.settings))
    }

    /// Fails unless every message is delivered by one attempt.
    fn ends_without_a_duplicate(self, relay: &Running, other: &Running) {
        eventually("all messages are settled", || {
            self.database.number("SELECT count(*) FROM {o}") == 0
        });
        all_are_delivered(&self.database, MESSAGES);
        all_have_arrived(&self.database, &[&self.first, &self.second]);
        assert_eq!(duplicates(&[&self.first, &self.second]), 0);
        assert!(attempts(&self.database).values().all(|made| *made == 1));
        assert_eq!(lines_with(relay, "lease_lost"), 0, "{}", relay.log());
        assert_eq!(lines_with(other, "conflict"), 0, "{}", other.log());
    }
}

/// `before`: whether the other relay already runs when the first relay is killed.
fn is_taken_over_soon(before: bool, settings: &'static [(&'static str, &'static str)]) {
    let _alone = alone();
    let scene = Scene {
        settings,
        ..Scene::new()
    };
    let victim = scene.begin(None);
    let beside = before.then(|| scene.another());
    if before {
        eventually("the other relay runs", || {
            scene
                .database
                .number("SELECT count(*) FROM {o}_lease WHERE takeover_after IS NOT NULL")
                == 2
        });
    }
    let sending = scene.first.count();
    victim.kill();
    let killed = Instant::now();
    let mut other = beside.unwrap_or_else(|| scene.another());
    eventually("all messages are settled", || {
        scene.database.number("SELECT count(*) FROM {o}") == 0
    });
    let took = killed.elapsed();
    eprintln!("taken over and delivered after {took:?}");
    assert!(took < SOON, "{took:?}: {}", other.log());
    all_are_delivered(&scene.database, MESSAGES);
    all_have_arrived(&scene.database, &[&scene.first, &scene.second]);
    assert_eq!(scene.first.count(), sending);
    assert_eq!(scene.second.count(), MESSAGES);
    other.signal("TERM");
    assert_eq!(other.wait().code(), Some(0), "{}", other.log());
}

/// R12, R15: T-3 by processes.
#[test]
fn messages_of_a_killed_relay_are_delivered_by_another_in_seconds() {
    is_taken_over_soon(true, DEFAULTS);
}

/// R15, R56: a long timeout delays no takeover.
#[test]
fn messages_of_a_killed_relay_whose_sends_may_take_minutes_are_delivered_as_soon() {
    is_taken_over_soon(true, PATIENT);
}

/// R15, G4: a relay that no longer sees its lease closes the connection of its send before another relay sends the
/// message. The receiver would respond after minutes.
#[test]
fn a_relay_that_is_cut_off_closes_its_sends() {
    let _alone = alone();
    let scene = Scene {
        settings: PATIENT,
        ..Scene::new()
    };
    let proxy = Proxy::new(&scene.database);
    let relay = scene.begin(Some(&proxy));
    let mut other = scene.another();
    let began = Instant::now();
    proxy.cut_off();
    relay.wait_for_log("event=send_closed");
    let closed = began.elapsed();
    eventually("the other relay sends", || scene.second.count() > 0);
    let taken_over = began.elapsed();
    assert!(
        closed < taken_over && taken_over < SOON,
        "{closed:?} {taken_over:?}"
    );
    eventually("all messages are settled", || {
        scene.database.number("SELECT count(*) FROM {o}") == 0
    });
    all_are_delivered(&scene.database, MESSAGES);
    proxy.restore();
    other.signal("TERM");
    assert_eq!(other.wait().code(), Some(0), "{}", other.log());
}

/// R15: the janitor of the other relay would find the messages once an hour.
#[test]
fn messages_of_a_lease_whose_row_is_removed_are_delivered_by_another_relay_in_seconds() {
    let _alone = alone();
    let scene = Scene::new();
    let victim = scene.begin(None);
    let mut other = scene.another();
    eventually("the other relay runs", || {
        scene
            .database
            .number("SELECT count(*) FROM {o}_lease WHERE takeover_after IS NOT NULL")
            == 2
    });
    let process = victim.pid();
    victim.kill();
    let removed = scene.database.execute(&format!(
        "DELETE FROM {{o}}_lease WHERE id = ANY({})",
        leases_of(&scene.database, process)
    ));
    assert_eq!(removed, 1);
    let began = Instant::now();
    eventually("all messages are settled", || {
        scene.database.number("SELECT count(*) FROM {o}") == 0
    });
    let took = began.elapsed();
    // The other relay looks for missing rows every five seconds, and cannot know that the first relay is dead.
    assert!(
        took < SOON + Duration::from_secs(8),
        "{took:?}: {}",
        other.log()
    );
    all_are_delivered(&scene.database, MESSAGES);
    assert_eq!(
        lines_with(&other, "event=lease_vanished"),
        1,
        "{}",
        other.log()
    );
    other.signal("TERM");
    assert_eq!(other.wait().code(), Some(0), "{}", other.log());
}

/// R12, R15: T-3 by processes.
#[test]
fn a_lone_relay_that_starts_again_has_what_it_held_in_seconds() {
    is_taken_over_soon(false, DEFAULTS);
}

/// G3: the relay comes back before its lease expires, and no other relay has sent its messages.
#[test]
fn a_relay_that_is_cut_off_for_5_seconds_is_not_doubled() {
    let _alone = alone();
    let scene = Scene::new();
    let proxy = Proxy::new(&scene.database);
    let relay = scene.begin(Some(&proxy));
    let other = scene.another();
    proxy.cut_off();
    // The responses arrive while the relay cannot settle them.
    scene.gate.open();
    let began = Instant::now();
    other.wait_for_log("event=session_gone");
    let_pass(AWAY.saturating_sub(began.elapsed()));
    proxy.restore();
    scene.ends_without_a_duplicate(&relay, &other);
}

/// G3: the relay's sessions stay open meanwhile.
#[test]
fn a_relay_that_is_stopped_for_5_seconds_is_not_doubled() {
    let _alone = alone();
    let scene = Scene::new();
    let relay = scene.begin(None);
    let other = scene.another();
    relay.stop();
    scene.gate.open();
    let_pass(AWAY);
    relay.signal("CONT");
    assert_eq!(
        lines_with(&other, "event=session_gone"),
        0,
        "{}",
        other.log()
    );
    scene.ends_without_a_duplicate(&relay, &other);
}
