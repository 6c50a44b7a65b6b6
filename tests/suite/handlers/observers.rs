//! Hooks.

use super::*;

/// Counts what it is told; panics now and then.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    fn push(&self, line: String) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line);
    }
}

impl Observer for Told {
    fn sending(&self, message: &Message, destination: &str) {
        self.push(format!("sending {} to {destination}", message.payload));
    }

    fn sent(&self, message: &Message, _: &str, outcome: &Outcome, took: Duration) {
        let is_delivered = matches!(outcome, Outcome::Delivered(_));
        self.push(format!("sent {} {is_delivered}", message.topic));
        assert!(took < PATIENCE);
        assert!(!is_delivered, "a panic of an observer");
    }

    fn settled(&self, settled: &Settled<'_>) {
        let Settled {
            status,
            reason,
            attempts,
            ..
        } = settled;
        let reason = reason.map_or("", |reason| reason.as_str());
        self.push(format!("{status} {attempts} {reason}"));
    }
}

/// One with the hooks as they are.
struct Silent;

impl Observer for Silent {}

#[test]
fn observers_are_told_of_each_step_and_their_panics_harm_nobody() {
    let database = Database::new();
    let told = Told::default();
    let relay = database
        .relay()
        .observe(told.clone())
        .observe(Silent)
        .on::<MemberJoined>(|_, context| {
            if context.attempt() == 1 {
                return Err(HandlerError::retry("not yet"));
            }
            Ok(())
        })
        .start()
        .expect("a relay");
    join(&database, 5);
    eventually("it is handled", || database.count("delivered") == 1);
    stop(relay);
    let lines = told.0.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(
        *lines,
        [
            "sending {\"member_id\":5} to handlers",
            "sent member.joined false",
            "retrying 1 FAILED",
            "sending {\"member_id\":5} to handlers",
            "sent member.joined true",
            "delivered 2 ",
        ]
    );
}
