//! The back-off while other relays claim keyed messages: keyed claims exclude one another.

use std::time::{Duration, Instant};

/// A claim takes a few milliseconds.
const SHORTEST: Duration = Duration::from_millis(1);
/// A relay that is stopped during its claim holds the lock for two seconds.
const LONGEST: Duration = Duration::from_millis(100);

/// The pause before the next keyed claim. It doubles with each claim in a row that another relay blocks.
#[derive(Debug, Default)]
pub(super) struct Contention {
    until: Option<Instant>,
    in_a_row: u32,
    /// The last claim was blocked: the next step waits.
    is_beaten: bool,
}

impl Contention {
    /// Learns how a claim has ended.
    pub(super) fn learn(&mut self, now: Instant, claim: OfKeys) {
        let random = match claim {
            OfKeys::None => return,
            OfKeys::Done => return *self = Self::default(),
            OfKeys::Beaten(random) => random,
        };
        let pause = SHORTEST
            .saturating_mul(2_u32.saturating_pow(self.in_a_row))
            .min(LONGEST);
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.until = Some(now + pause.mul_f64(0.5 + random / 2.0));
        self.is_beaten = true;
    }

    /// Whether another relay has blocked the last claim.
    pub(super) fn take_beaten(&mut self) -> bool {
        std::mem::take(&mut self.is_beaten)
    }

    /// How long keyed claims must still wait.
    pub(super) fn left(&self, now: Instant) -> Duration {
        self.until
            .map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }
}

/// A claim of keyed messages. Such claims of all relays exclude one another.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum OfKeys {
    #[default]
    None,
    Done,
    /// Another relay was claiming. The number is from 0 to 1, so that relays do not retry at the same time.
    Beaten(f64),
}

impl OfKeys {
    pub(super) fn is_beaten(self) -> bool {
        matches!(self, Self::Beaten(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_up_to_its_limit_and_a_claim_ends_it() {
        let mut contention = Contention::default();
        let now = Instant::now();
        assert_eq!(contention.left(now), Duration::ZERO);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            contention.learn(now, OfKeys::Beaten(1.0));
            let until = contention.until.expect("a pause");
            pauses.push((until - now).as_millis());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 100, 100, 100]);
        contention.learn(now, OfKeys::Beaten(0.0));
        assert_eq!(contention.until.map(|until| until - now), Some(LONGEST / 2));
        assert_eq!(contention.left(now), LONGEST / 2);
        contention.learn(now, OfKeys::Done);
        assert_eq!(contention.left(now), Duration::ZERO);
        contention.learn(now, OfKeys::Beaten(1.0));
        assert_eq!(contention.until.map(|until| until - now), Some(SHORTEST));
    }
}
