//! A resolver for ureq that remembers, and that starts no thread for a request.
//!
//! ureq's own one starts a thread for each request with a timeout, and leaves it behind where a
//! lookup hangs. Here two threads look up for everybody, callers wait until their deadline, and
//! answers are kept for a short time.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// How long an answer is kept. Short, for receivers that move.
const KEEP: Duration = Duration::from_secs(10);
/// How long a failure is kept: one lookup answers all senders that wait for it.
const KEEP_FAILURE: Duration = Duration::from_secs(1);
/// Lookups that go on at once. A hanging one leaves the other.
const THREADS: usize = 2;
/// Lookups that may wait for a thread.
const QUEUE: usize = 256;
/// What ureq takes.
const MOST_ADDRESSES: usize = 16;

/// A host and a port.
type Target = (String, u16);
type Answer = Result<Vec<SocketAddr>, LookupFailed>;

pub(super) struct CachingResolver {
    cache: Arc<Cache>,
    lookups: Sender<(Target, Sender<Answer>)>,
}

#[derive(Default)]
struct Cache {
    answers: RwLock<HashMap<Target, (Answer, Instant)>>,
}

/// A name that could not be resolved.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot resolve {host}: {reason}")]
pub(super) struct LookupFailed {
    host: String,
    reason: String,
}

impl CachingResolver {
    /// Starts the threads. They end when the resolver is dropped, after the lookup at hand.
    pub(super) fn new() -> std::io::Result<Self> {
        let cache = Arc::new(Cache::default());
        let (lookups, queue) = bounded(QUEUE);
        for number in 1..=THREADS {
            let (cache, queue) = (Arc::clone(&cache), queue.clone());
            std::thread::Builder::new()
                .name(format!("relay-dns-{number}"))
                .spawn(move || look_up_all(&cache, &queue))?;
        }
        Ok(Self { cache, lookups })
    }

    fn addresses(
        &self,
        target: Target,
        timeout: &NextTimeout,
    ) -> Result<Vec<SocketAddr>, ureq::Error> {
        if let Some(answer) = self.cache.get(&target) {
            return answer.map_err(into_ureq);
        }
        let (reply, answer) = bounded(1);
        let deadline = Instant::now() + (*timeout.after).min(LONGEST_WAIT);
        let too_late = || ureq::Error::Timeout(timeout.reason);
        self.lookups
            .send_deadline((target, reply), deadline)
            .map_err(|_| too_late())?;
        answer
            .recv_deadline(deadline)
            .map_err(|_| too_late())?
            .map_err(into_ureq)
    }
}

/// Where ureq has no timeout it says so by an endless one, which an `Instant` cannot hold.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

fn into_ureq(error: LookupFailed) -> ureq::Error {
    ureq::Error::Other(Box::new(error))
}

fn look_up_all(cache: &Cache, queue: &Receiver<(Target, Sender<Answer>)>) {
    for (target, reply) in queue {
        let answer = cache.get(&target).unwrap_or_else(|| {
            let answer = look_up(&target);
            cache.put(target, answer.clone());
            answer
        });
        // The caller may be gone: its time was over.
        let _ = reply.send(answer);
    }
}

fn look_up(target: &Target) -> Answer {
    let failed = |reason: String| LookupFailed {
        host: target.0.clone(),
        reason,
    };
    let found: Vec<SocketAddr> = match (target.0.as_str(), target.1).to_socket_addrs() {
        Ok(found) => found.take(MOST_ADDRESSES).collect(),
        // Known without a lookup (RFC 6761), also where there is no /etc/hosts.
        Err(_) if target.0.eq_ignore_ascii_case("localhost") => vec![
            SocketAddr::from((Ipv4Addr::LOCALHOST, target.1)),
            SocketAddr::from((Ipv6Addr::LOCALHOST, target.1)),
        ],
        Err(error) => return Err(failed(error.to_string())),
    };
    if found.is_empty() {
        return Err(failed("it has no address".to_owned()));
    }
    Ok(found)
}

impl Cache {
    fn get(&self, target: &Target) -> Option<Answer> {
        let answers = self.answers.read().unwrap_or_else(PoisonError::into_inner);
        let (answer, until) = answers.get(target)?;
        (Instant::now() < *until).then(|| answer.clone())
    }

    fn put(&self, target: Target, answer: Answer) {
        let keep = if answer.is_ok() { KEEP } else { KEEP_FAILURE };
        let mut answers = self.answers.write().unwrap_or_else(PoisonError::into_inner);
        answers.insert(target, (answer, Instant::now() + keep));
    }
}

impl Resolver for CachingResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let bad = |what: &str| ureq::Error::BadUri(format!("{uri}: {what}"));
        let host = uri.host().ok_or_else(|| bad("no host"))?;
        let port = uri
            .port_u16()
            .or_else(|| match uri.scheme_str() {
                Some("http") => Some(80),
                Some("https") => Some(443),
                _ => None,
            })
            .ok_or_else(|| bad("no port"))?;
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        let addresses = match literal.parse::<IpAddr>() {
            Ok(address) => vec![SocketAddr::new(address, port)],
            Err(_) => self.addresses((host.to_owned(), port), &timeout)?,
        };
        let mut resolved = self.empty();
        for address in config.ip_family().keep_wanted(addresses.into_iter()) {
            resolved.push(address);
        }
        if resolved.is_empty() {
            return Err(ureq::Error::HostNotFound);
        }
        Ok(resolved)
    }
}

impl fmt::Debug for CachingResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingResolver").finish_non_exhaustive()
    }
}
