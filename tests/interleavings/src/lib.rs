//! The relay's wake-ups, in every order that two threads and their memory allow.
//!
//! The types under test use the atomics of [loom](https://docs.rs/loom).

#![cfg(test)]

#[path = "../../../src/engine/plan/wanted.rs"]
mod wanted;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use self::wanted::RoomWanted;

/// When a claimer looks for room while a sender makes room, at least one of them sees the other.
#[test]
fn no_wake_up_is_lost_between_a_look_and_a_wait() {
    loom::model(|| {
        let (wanted, has_room) = (
            Arc::new(RoomWanted::default()),
            Arc::new(AtomicBool::new(false)),
        );
        let sender = {
            let (wanted, has_room) = (Arc::clone(&wanted), Arc::clone(&has_room));
            thread::spawn(move || {
                has_room.store(true, Ordering::Relaxed);
                wanted.is_so()
            })
        };
        wanted.want();
        let is_seen = has_room.load(Ordering::Relaxed);
        let rings = sender.join().expect("no panic");
        assert!(is_seen || rings);
        wanted.no_more();
        assert!(!wanted.is_so());
    });
}

/// Two senders, and a claimer that waits for an empty queue: the last sender rings.
#[test]
fn the_last_of_several_rings() {
    loom::model(|| {
        let wanted = Arc::new(RoomWanted::default());
        let queued = Arc::new(loom::sync::atomic::AtomicUsize::new(2));
        let takes = |_| {
            let (wanted, queued) = (Arc::clone(&wanted), Arc::clone(&queued));
            thread::spawn(move || {
                queued.fetch_sub(1, Ordering::Relaxed);
                wanted.is_so()
            })
        };
        let senders = [0, 1].map(takes);
        wanted.want();
        let is_seen = queued.load(Ordering::Relaxed) == 0;
        let rings = senders.map(|sender| sender.join().expect("no panic"));
        assert!(is_seen || rings.contains(&true));
    });
}
