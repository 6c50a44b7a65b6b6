//! Observers, the hooks of a relay.

use super::*;

/// Records the calls, and panics now and then.
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

/// An observer with the default hooks.
struct Silent;

impl Observer for Silent {}

#[test]
fn observers_see_each_step_and_their_panics_do_no_harm() {
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
    eventually("the message is handled", || {
        database.count("delivered") == 1
    });
    end(&relay);
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

/// Delays the first send until the relay has another lease.
struct Slow {
    database: Arc<Database>,
    told: Arc<AtomicUsize>,
}

impl Observer for Slow {
    fn sending(&self, _: &Message, _: &str) {
        if self.told.fetch_add(1, Ordering::SeqCst) > 0 {
            return;
        }
        let first = "(SELECT min(id) FROM {o}_lease)";
        let first = self.database.number(&format!("SELECT {first}"));
        self.database
            .execute(&format!("DELETE FROM {{o}}_lease WHERE id = {first}"));
        eventually("the relay takes another lease", || {
            self.database.number("SELECT count(*) FROM {o}_lease") == 1
        });
    }
}

/// R14, G4
#[test]
fn an_observer_that_outlasts_the_lease_lets_nothing_be_sent_under_it() {
    let database = Arc::new(Database::new());
    let told = Arc::new(AtomicUsize::new(0));
    let told_at_the_call = Arc::new(AtomicUsize::new(0));
    let (count, seen) = (Arc::clone(&told), Arc::clone(&told_at_the_call));
    let relay = database
        .relay()
        .observe(Slow {
            database: Arc::clone(&database),
            told: Arc::clone(&told),
        })
        .on::<MemberJoined>(move |_, _| {
            seen.store(count.load(Ordering::SeqCst), Ordering::SeqCst);
            Ok(())
        })
        .start()
        .expect("a relay");
    join(&database, 1);
    eventually("the message is handled", || {
        database.count("delivered") == 1
    });
    assert_eq!(told_at_the_call.load(Ordering::SeqCst), 2);
    assert_eq!(database.number("SELECT attempts FROM {o}_ledger"), 1);
    end(&relay);
}
