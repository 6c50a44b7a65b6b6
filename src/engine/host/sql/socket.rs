//! The socket of a connection of libpq, so that another thread can shut it down: Diesel does not give it away.
//!
//! A TCP connection is found by its user timeout (`tcp_user_timeout`), which libpq sets as we ask. Each connection of the
//! process asks for another number of milliseconds ([`Tag`]). So the socket can be found when it is needed, also while
//! libpq still connects, and no other socket is taken for it.
//!
//! A connection without the tag is one over a Unix socket, one whose URL sets `tcp_user_timeout` or turns keep-alive off,
//! and one of an application's manager. It is the one socket that was not there before the connection was opened
//! ([`opened_since`]). So those of this crate are opened in turn, except the listener's, whose socket libpq tells. If the
//! application opened others at that moment, another connection is opened (but a manager is not asked again), and at
//! last none is taken.
//!
//! Only on Linux: elsewhere no socket is found, and the loss of a server is noticed by keep-alive alone.
//!
//! Why: docs/decisions.md#connections-that-do-not-answer

use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock};

use super::address::USER_TIMEOUT;
use crate::lock::lock;

/// The tags in use.
static TAGS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The cookies of the connections that are known and have no tag.
static KNOWN: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// What tells the sockets of a URL's connections from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Their tag.
    Tagged,
    /// Nothing: they must be opened in turn.
    Untagged,
    /// The same, and they are TCP connections without keep-alive.
    NotKeptAlive,
}

/// A user timeout in milliseconds that no other connection of this process asks for.
#[derive(Debug)]
pub(super) struct Tag(u32);

impl Tag {
    /// The first that is free. So the timeout is hardly longer than it has to be.
    fn new() -> Self {
        let mut tags = lock(&TAGS);
        let mut free = USER_TIMEOUT + 1;
        for tag in tags.iter() {
            if *tag != free {
                break;
            }
            free += 1;
        }
        tags.insert(free);
        Self(free)
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        lock(&TAGS).remove(&self.0);
    }
}

/// What identifies a socket. Linux gives each a number, its cookie, that no other gets.
#[derive(Debug)]
pub(crate) struct Socket {
    tag: Tag,
    cookie: OnceLock<u64>,
}

impl Socket {
    pub(crate) fn new() -> Self {
        Self {
            tag: Tag::new(),
            cookie: OnceLock::new(),
        }
    }

    /// The parameter of libpq that marks the socket.
    pub(crate) fn parameter(&self) -> (&'static str, String) {
        ("tcp_user_timeout", self.tag.0.to_string())
    }

    /// The connection has this socket, and no tag.
    pub(super) fn set_cookie(&self, cookie: u64) {
        lock(&KNOWN).insert(cookie);
        // Set once, after the connection was opened.
        let _ = self.cookie.set(cookie);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(cookie) = self.cookie.get() {
            lock(&KNOWN).remove(cookie);
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::{cookies, opened_since};
#[cfg(target_os = "linux")]
pub(super) use linux::{cookies, opened_since};

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::HashSet;
    use std::os::fd::{AsFd, BorrowedFd, RawFd};

    use rustix::net::sockopt::{socket_cookie, socket_domain, socket_keepalive, tcp_user_timeout};
    use rustix::net::{AddressFamily, Shutdown, getpeername, shutdown};

    use super::super::libpq::with_descriptor;
    use super::{KNOWN, Kind, Socket, TAGS};
    use crate::lock::lock;

    /// The cookies of all sockets of this process.
    pub(crate) type Cookies = HashSet<u64>;

    impl Socket {
        /// Whether the connection is open and has its tag.
        pub(crate) fn is_tagged(&self) -> bool {
            descriptors().any(|number| with_descriptor(number, |fd| self.has_tag(fd)))
        }

        /// The connection was opened with this socket.
        pub(crate) fn found(&self, fd: BorrowedFd<'_>) -> Kind {
            if self.has_tag(fd) {
                return Kind::Tagged;
            }
            if let Ok(cookie) = socket_cookie(fd) {
                self.set_cookie(cookie);
            }
            let is_unix = socket_domain(fd) == Ok(AddressFamily::UNIX);
            match is_unix || socket_keepalive(fd) == Ok(true) {
                true => Kind::Untagged,
                false => Kind::NotKeptAlive,
            }
        }

        /// Ends the connection, if its socket is found: who waits for it gets an error.
        pub(crate) fn shut_down(&self) {
            let found = descriptors().find_map(|number| {
                // A duplicate stays the same socket, even if the connection is closed meanwhile.
                let own = with_descriptor(number, |fd| {
                    self.is(fd).then(|| fd.try_clone_to_owned().ok()).flatten()
                })?;
                self.is(own.as_fd()).then_some(own)
            });
            if let Some(socket) = found {
                // Fails if the connection was closed meanwhile.
                let _ = shutdown(&socket, Shutdown::Both);
            }
        }

        fn has_tag(&self, fd: BorrowedFd<'_>) -> bool {
            tcp_user_timeout(fd) == Ok(self.tag.0)
        }

        fn is(&self, fd: BorrowedFd<'_>) -> bool {
            match self.cookie.get() {
                Some(cookie) => socket_cookie(fd) == Ok(*cookie),
                None => self.has_tag(fd),
            }
        }
    }

    /// The open descriptors of this process, of any kind.
    fn descriptors() -> impl Iterator<Item = RawFd> {
        let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
    }

    /// All sockets of this process.
    pub(crate) fn cookies() -> Cookies {
        let cookie = |number| with_descriptor(number, |fd| socket_cookie(fd).ok());
        descriptors().filter_map(cookie).collect()
    }

    /// The connections without a tag that were opened since `before`, except the known ones.
    pub(crate) fn opened_since(before: &Cookies, kind: Kind) -> Vec<u64> {
        let new = descriptors().filter_map(|number| {
            let cookie = with_descriptor(number, |fd| {
                may_be_of_libpq(fd, kind)
                    .then(|| socket_cookie(fd).ok())
                    .flatten()
            })?;
            let is_other = before.contains(&cookie) || lock(&KNOWN).contains(&cookie);
            (!is_other).then_some(cookie)
        });
        // A descriptor may be a duplicate.
        new.collect::<Cookies>().into_iter().collect()
    }

    /// Whether this is a connection as libpq opens them, and none of those with a tag.
    fn may_be_of_libpq(fd: BorrowedFd<'_>, kind: Kind) -> bool {
        if getpeername(fd).is_err() {
            return false;
        }
        match socket_domain(fd) {
            Ok(AddressFamily::UNIX) => true,
            Ok(AddressFamily::INET | AddressFamily::INET6) => {
                let is_tagged = || tcp_user_timeout(fd).is_ok_and(|tag| lock(&TAGS).contains(&tag));
                let is_kept_alive = kind != Kind::NotKeptAlive;
                socket_keepalive(fd) == Ok(is_kept_alive) && !is_tagged()
            }
            _ => false,
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use std::os::fd::BorrowedFd;

    use super::{Kind, Socket};

    impl Socket {
        /// Nothing else identifies the connection.
        pub(crate) fn is_tagged(&self) -> bool {
            true
        }

        pub(crate) fn found(&self, _: BorrowedFd<'_>) -> Kind {
            Kind::Tagged
        }

        pub(crate) fn shut_down(&self) {}
    }

    pub(crate) fn cookies() {}

    pub(crate) fn opened_since(_: &(), _: Kind) -> Vec<u64> {
        Vec::new()
    }
}
