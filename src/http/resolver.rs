//! A resolver for ureq. It starts no thread for a request, and returns no address that the destination must
//! not have.
//!
//! ureq's own resolver starts a thread for each request with a timeout, and leaks the thread if a lookup
//! hangs.
//!
//! Why: docs/decisions.md#ureq

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ureq::Timeout;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;
use url::Url;

use super::egress::Egress;
use super::lookups::{Lookups, Name};
use super::proxy::Via;
use crate::shows::shows;

/// The most addresses that ureq accepts.
const MOST_ADDRESSES: usize = 16;
/// ureq expresses "no timeout" as an endless duration, which does not fit into an `Instant`.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// The resolver of one destination. It resolves only the host of the destination, or its proxy, regardless of the
/// requested URI.
#[derive(Clone)]
pub(super) struct FirstAddress {
    lookups: Arc<Lookups>,
    host: Arc<str>,
    place: ResolverPlace,
    egress: Egress,
    via: Option<Arc<Via>>,
}

#[derive(Clone)]
enum ResolverPlace {
    Address(SocketAddr),
    Name(Name),
}

impl FirstAddress {
    /// The resolver of a destination without a proxy.
    pub(super) fn of(lookups: &Arc<Lookups>, url: &Url, egress: Egress) -> Self {
        Self::at(lookups, url, egress, None)
    }

    /// The resolver of a proxy, which may have any address: an operator has configured it.
    pub(super) fn of_proxy(lookups: &Arc<Lookups>, via: &Arc<Via>) -> Self {
        Self::at(lookups, &via.url, Egress::Any, Some(Arc::clone(via)))
    }

    fn at(lookups: &Arc<Lookups>, url: &Url, egress: Egress, via: Option<Arc<Via>>) -> Self {
        // Both exist: an http or https URL has a host, and both schemes have a default port.
        let host: Arc<str> = url.host_str().unwrap_or_default().into();
        let port = url.port_or_known_default().unwrap_or_default();
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        let place = match literal.parse::<IpAddr>() {
            Ok(address) => ResolverPlace::Address(SocketAddr::new(address, port)),
            Err(_) => ResolverPlace::Name((Arc::clone(&host), port)),
        };
        Self {
            lookups: Arc::clone(lookups),
            host,
            place,
            egress,
            via,
        }
    }

    /// The addresses, which a lookup finds within this time.
    pub(super) fn addresses(&self, within: Duration) -> Result<Vec<SocketAddr>, ureq::Error> {
        let found = match &self.place {
            ResolverPlace::Address(address) => Arc::from([*address]),
            ResolverPlace::Name(name) => {
                let deadline = Instant::now() + within.min(LONGEST_WAIT);
                self.lookups
                    .addresses(name, deadline)
                    .ok_or(ureq::Error::Timeout(Timeout::Resolve))?
                    .map_err(|error| match error.shortage {
                        Some(shortage) => ureq::Error::Other(Box::new(shortage)),
                        None => ureq::Error::Other(Box::new(error)),
                    })?
            }
        };
        self.egress
            .filter(&self.host, &found)
            .map_err(|blocked| ureq::Error::Other(Box::new(blocked)))
    }
}

impl Resolver for FirstAddress {
    fn resolve(
        &self,
        _: &Uri,
        _: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let addresses = self
            .addresses(*timeout.after)
            .map_err(|error| match &self.via {
                Some(via) => via.unreachable(error),
                None => error,
            })?;
        let mut resolved = self.empty();
        for address in addresses.into_iter().take(MOST_ADDRESSES) {
            resolved.push(address);
        }
        Ok(resolved)
    }
}

shows!(FirstAddress: host);

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, mpsc};

    use ureq::unversioned::transport::time;

    use super::super::lookups::{THREADS, Times};
    use super::*;

    const PUBLIC: Egress = Egress::Public { allow: Vec::new() };

    fn lookups(
        lookup: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
        keep: Duration,
    ) -> Arc<Lookups> {
        let times = Times {
            keep,
            keep_failure: keep,
            patience: SOON,
        };
        Arc::new(Lookups::new(Box::new(lookup), THREADS, times))
    }

    fn resolver(lookups: &Arc<Lookups>, url: &str, egress: Egress) -> FirstAddress {
        FirstAddress::of(lookups, &url.parse().expect("a URL"), egress)
    }

    fn resolve(resolver: &FirstAddress, within: Duration) -> Result<Vec<String>, ureq::Error> {
        let timeout = NextTimeout {
            after: time::Duration::Exact(within),
            reason: Timeout::Global,
            ..NextTimeout::default()
        };
        let elsewhere = Uri::from_static("http://elsewhere.example/");
        let found = resolver.resolve(&elsewhere, &Config::default(), timeout)?;
        Ok(found.iter().map(ToString::to_string).collect())
    }

    const SOON: Duration = Duration::from_secs(20);

    fn error_of(result: Result<Vec<String>, ureq::Error>) -> String {
        match result.expect_err("no address") {
            ureq::Error::Other(inner) => inner.to_string(),
            other => other.to_string(),
        }
    }

    #[test]
    fn a_name_that_moves_to_a_private_address_is_refused_when_the_kept_result_has_expired() {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let lookup = move |_: &str, port| {
            let address = match counted.fetch_add(1, Ordering::Relaxed) {
                0 => [93, 184, 216, 34],
                _ => [10, 0, 0, 1],
            };
            Ok(vec![SocketAddr::from((address, port))])
        };
        let keep = Duration::from_millis(300);
        let lookups = lookups(lookup, keep);
        let resolver = resolver(&lookups, "http://rebound.example:81/", PUBLIC);
        let started = Instant::now();
        let first = resolve(&resolver, SOON).expect("a public address");
        assert_eq!(first, ["93.184.216.34:81"]);
        let second = resolve(&resolver, SOON);
        if started.elapsed() < keep {
            assert_eq!(second.expect("kept"), first);
            assert_eq!(count.load(Ordering::Relaxed), 1, "one lookup for both");
        }
        std::thread::sleep(keep);
        let error = error_of(resolve(&resolver, SOON));
        assert!(
            error.starts_with("blocked address 10.0.0.1 (private) of rebound.example"),
            "{error}"
        );
        assert!(
            count.load(Ordering::Relaxed) >= 2,
            "the name was looked up again"
        );
    }

    #[test]
    fn refused_addresses_are_left_out() {
        let lookup = |_: &str, port| {
            let addresses = [
                [127, 0, 0, 1],
                [8, 8, 8, 8],
                [169, 254, 169, 254],
                [9, 9, 9, 9],
            ];
            Ok(addresses
                .map(|address| SocketAddr::from((address, port)))
                .to_vec())
        };
        let lookups = lookups(lookup, SOON);
        let public = resolver(&lookups, "http://a.example/", PUBLIC);
        assert_eq!(
            resolve(&public, SOON).expect("two are public"),
            ["8.8.8.8:80", "9.9.9.9:80"]
        );
        let usual = resolver(&lookups, "https://a.example/", Egress::NoMetadata);
        assert_eq!(
            resolve(&usual, SOON).expect("three"),
            ["127.0.0.1:443", "8.8.8.8:443", "9.9.9.9:443"]
        );
    }

    #[test]
    fn refused_addresses_are_left_out_before_the_rest_is_cut_to_the_maximum() {
        let lookup = |_: &str, port| {
            let of = |network| move |n| SocketAddr::from(([network, 0, 0, n], port));
            Ok((0..20).map(of(10)).chain((0..20).map(of(8))).collect())
        };
        let resolver = resolver(&lookups(lookup, SOON), "http://a.example/", PUBLIC);
        let found = resolve(&resolver, SOON).expect("public addresses");
        assert_eq!(found.len(), MOST_ADDRESSES);
        assert!(found.iter().all(|address| address.starts_with("8.")));
    }

    #[test]
    fn an_address_in_the_url_is_checked_without_a_lookup() {
        let lookup = |_: &str, _| -> io::Result<Vec<SocketAddr>> { panic!("no lookup is needed") };
        let lookups = lookups(lookup, SOON);
        let metadata = "http://[::ffff:169.254.169.254]/";
        let error = error_of(resolve(&resolver(&lookups, metadata, PUBLIC), SOON));
        assert!(error.starts_with("blocked address"), "{error}");
        assert!(!error.contains(" of "), "{error}");
        let any = resolver(&lookups, "http://2130706433:8080/", Egress::Any);
        assert_eq!(resolve(&any, SOON).expect("an address"), ["127.0.0.1:8080"]);
    }

    #[test]
    fn a_hanging_name_costs_its_callers_their_time_and_others_nothing() {
        let (release, hang) = mpsc::channel::<()>();
        let hang = Mutex::new(hang);
        let lookup = move |host: &str, port| {
            if host == "hangs.example" {
                // Until the end of the test.
                let _ = hang.lock().expect("one lookup per name at a time").recv();
            }
            Ok(vec![SocketAddr::from(([8, 8, 8, 8], port))])
        };
        let lookups = lookups(lookup, SOON);
        let hanging = resolver(&lookups, "http://hangs.example/", PUBLIC);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let error = resolve(&hanging, Duration::from_millis(50));
                    assert!(matches!(error, Err(ureq::Error::Timeout(_))), "{error:?}");
                });
            }
        });
        let other = resolver(&lookups, "http://b.example/", PUBLIC);
        resolve(&other, SOON).expect("the other thread is free");
        drop((hanging, other));

        let dropped = Instant::now();
        drop(Arc::into_inner(lookups).expect("the last one"));
        assert!(
            dropped.elapsed() < Duration::from_secs(10),
            "the drop waits for the hanging lookup"
        );
        drop(release);
    }

    /// R46: anyone who registers a destination can make lookups of its name hang.
    #[test]
    fn names_that_failed_and_hang_leave_a_thread_to_others() {
        let (release, hang) = mpsc::channel::<()>();
        let (hang, has_failed) = (Mutex::new(hang), Mutex::new(HashSet::new()));
        let lookup = move |host: &str, port| {
            if host.starts_with("bad") {
                if has_failed.lock().expect("no panic").insert(host.to_owned()) {
                    return Err(io::Error::other("no"));
                }
                let _ = hang.lock().expect("no panic").recv();
            }
            Ok(vec![SocketAddr::from(([8, 8, 8, 8], port))])
        };
        let lookups = lookups(lookup, Duration::ZERO);
        for number in 0..THREADS {
            let url = format!("http://bad{number}.example/");
            let bad = resolver(&lookups, &url, PUBLIC);
            let error = error_of(resolve(&bad, SOON));
            assert!(error.ends_with(": no"), "{error}");
            let error = resolve(&bad, Duration::from_millis(50));
            assert!(matches!(error, Err(ureq::Error::Timeout(_))), "{error:?}");
        }
        let other = resolver(&lookups, "http://b.example/", PUBLIC);
        resolve(&other, SOON).expect("one thread is free");
        drop(release);
    }

    /// R46
    #[test]
    fn while_a_lookup_hangs_the_previous_result_is_used() {
        let (release, hang) = mpsc::channel::<[u8; 4]>();
        let hang = Mutex::new(hang);
        let lookup = move |_: &str, port| {
            let address = hang.lock().expect("no panic").recv().expect("an address");
            Ok(vec![SocketAddr::from((address, port))])
        };
        let times = Times {
            keep: Duration::ZERO,
            patience: Duration::from_millis(50),
            ..Times::default()
        };
        let lookups = Arc::new(Lookups::new(Box::new(lookup), THREADS, times));
        let moves = resolver(&lookups, "http://a.example/", PUBLIC);
        release.send([8, 8, 8, 8]).expect("a lookup waits");
        let first = resolve(&moves, SOON).expect("the first address");
        let began = Instant::now();
        for _ in 0..3 {
            assert_eq!(resolve(&moves, SOON).expect("the same address"), first);
        }
        assert!(
            began.elapsed() < SOON / 2,
            "the resolver waits for the hanging lookup"
        );
        release.send([9, 9, 9, 9]).expect("a lookup waits");
        let until = Instant::now() + SOON;
        while resolve(&moves, SOON).expect("an address") == first {
            assert!(Instant::now() < until, "the new address is not used");
        }
    }

    #[test]
    fn a_lookup_that_panics_fails_and_costs_no_thread() {
        let lookup = |host: &str, port| match host {
            "good.example" => Ok(vec![SocketAddr::from(([8, 8, 8, 8], port))]),
            _ => panic!("no"),
        };
        let lookups = lookups(lookup, Duration::ZERO);
        let bad = resolver(&lookups, "http://bad.example/", PUBLIC);
        for _ in 0..=THREADS {
            let error = error_of(resolve(&bad, SOON));
            assert_eq!(error, "cannot resolve bad.example: the lookup panicked");
        }
        let good = resolver(&lookups, "http://good.example/", PUBLIC);
        resolve(&good, SOON).expect("an address");
    }

    #[test]
    fn no_address_is_a_failure() {
        let lookups = lookups(|_, _| Ok(Vec::new()), SOON);
        let resolver = resolver(&lookups, "http://a.example/", PUBLIC);
        let error = error_of(resolve(&resolver, SOON));
        assert_eq!(error, "cannot resolve a.example: the name has no address");
    }

    #[test]
    fn dropping_the_lookups_ends_their_threads() {
        let held = Arc::new(());
        let holds = Arc::clone(&held);
        let lookup = move |_: &str, port| {
            let _ = &holds;
            Ok(vec![SocketAddr::from(([8, 8, 8, 8], port))])
        };
        let lookups = lookups(lookup, SOON);
        resolve(&resolver(&lookups, "http://a.example/", PUBLIC), SOON).expect("an address");
        drop(lookups);
        let until = Instant::now() + SOON;
        while Arc::strong_count(&held) > 1 {
            assert!(Instant::now() < until, "a thread still holds the lookup");
            std::thread::yield_now();
        }
    }
}
