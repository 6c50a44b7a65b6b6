//! What the claimer, about to sleep, is to be woken for.

use std::sync::atomic::{AtomicU8, Ordering, fence};

/// What somebody else makes, and does not know whether the claimer waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Want {
    /// A place in some queue.
    Room = 1,
    /// That nothing is in flight any more.
    Settled = 2,
}

/// What the claimer waits for. Set by the claimer only.
///
/// The claimer says what it waits for, and then looks once more whether it is there. Others make it, and then
/// look whether it is waited for: only then they ring. Each side writes one thing and then reads the other's,
/// so one of the two sees what the other one has done: but only if no read overtakes the write before it. So
/// both have a fence between, and it is `SeqCst`: nothing weaker orders a write before a later read.
#[derive(Debug, Default)]
pub(crate) struct Wanted(AtomicU8);

impl Wanted {
    /// From now on whoever makes it rings. What is there already is to be looked at after this.
    pub(crate) fn want(&self, what: Want) {
        self.0.fetch_or(what as u8, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn no_more(&self, what: Want) {
        self.0.fetch_and(!(what as u8), Ordering::Relaxed);
    }

    /// Whether the claimer waits for what was made before this.
    pub(crate) fn is(&self, what: Want) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) & what as u8 != 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use super::*;

    #[test]
    fn each_is_wanted_by_itself() {
        let wanted = Wanted::default();
        wanted.want(Want::Room);
        assert!(wanted.is(Want::Room) && !wanted.is(Want::Settled));
        wanted.want(Want::Settled);
        wanted.no_more(Want::Room);
        assert!(!wanted.is(Want::Room) && wanted.is(Want::Settled));
    }

    /// Of a claimer that looks and a sender that makes room at the same time one sees the other. Without the fences
    /// neither does, two times in a hundred.
    #[test]
    fn no_wake_up_is_lost_between_a_look_and_a_wait() {
        const TIMES: usize = 300;
        let both = Barrier::new(2);
        let here = AtomicUsize::new(0);
        // A barrier wakes one after the other: they meet closer than that.
        let meet = |time: usize| {
            both.wait();
            here.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) < 2 * (time + 1) {
                std::hint::spin_loop();
            }
        };
        let (wanted, is_there) = (Wanted::default(), AtomicBool::new(false));
        let mut rings = Vec::new();
        let looks = std::thread::scope(|scope| {
            let claimer = scope.spawn(|| {
                let look = |time| {
                    wanted.no_more(Want::Room);
                    is_there.store(false, Ordering::SeqCst);
                    meet(time);
                    wanted.want(Want::Room);
                    let is_seen = is_there.load(Ordering::Relaxed);
                    both.wait();
                    is_seen
                };
                (0..TIMES).map(look).collect::<Vec<bool>>()
            });
            for time in 0..TIMES {
                meet(time);
                is_there.store(true, Ordering::Relaxed);
                rings.push(wanted.is(Want::Room));
                both.wait();
            }
            claimer.join().expect("no panic")
        });
        let lost = looks.iter().zip(&rings).filter(|(a, b)| !**a && !**b);
        assert_eq!(lost.count(), 0);
    }
}
