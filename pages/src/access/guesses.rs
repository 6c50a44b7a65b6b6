//! Counts wrong tokens, and forms of other sites, by the network that sent them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Wrong tokens and foreign forms within [`WINDOW`] that are logged. Later wrong tokens are told to wait.
const MOST: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Networks that are remembered.
const MOST_PLACES: usize = 10_000;

#[derive(Default)]
pub(super) struct Guesses {
    of_places: Mutex<HashMap<IpAddr, Place>>,
}

struct Place {
    began: Instant,
    wrong: u32,
}

impl Guesses {
    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, Place>> {
        self.of_places
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more. The error says how long the network of this peer must wait, and nothing was counted.
    pub(super) fn wrong(&self, peer: IpAddr, now: Instant) -> Result<(), Duration> {
        let mut places = self.lock();
        if places.len() >= MOST_PLACES {
            places.retain(|_, place| now.saturating_duration_since(place.began) < WINDOW);
        }
        let place = place_of(peer);
        if places.len() >= MOST_PLACES && !places.contains_key(&place) {
            return Ok(());
        }
        let fresh = Place {
            began: now,
            wrong: 0,
        };
        let place = places.entry(place).or_insert(fresh);
        let left = WINDOW.saturating_sub(now.saturating_duration_since(place.began));
        if left.is_zero() {
            (place.began, place.wrong) = (now, 0);
        }
        if place.wrong >= MOST {
            return Err(left);
        }
        place.wrong += 1;
        Ok(())
    }
}

/// The owner of an IPv6 address usually has the whole /64 network.
fn place_of(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let network = address.to_bits() >> 64 << 64;
            Ipv6Addr::from_bits(network).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_wrong_tokens_make_a_place_wait_and_no_other() {
        let (guesses, now) = (Guesses::default(), Instant::now());
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        for _ in 0..MOST {
            assert_eq!(guesses.wrong(address("2001:db8::1"), now), Ok(()));
        }
        assert_eq!(guesses.wrong(address("2001:db8::2"), now), Err(WINDOW));
        assert_eq!(guesses.wrong(address("2001:db8:0:1::1"), now), Ok(()));
        assert_eq!(guesses.wrong(address("192.0.2.1"), now), Ok(()));
        for _ in 0..MOST {
            assert_eq!(guesses.wrong(address("2001:db8::1"), now + WINDOW), Ok(()));
        }
        let later = now + WINDOW + Duration::from_secs(1);
        let left = WINDOW - Duration::from_secs(1);
        assert_eq!(guesses.wrong(address("2001:db8::1"), later), Err(left));
    }
}
