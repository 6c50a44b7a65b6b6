//! Stands between a relay and a receiver, and loses the first answers: the requests were received,
//! and the sender cannot know.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Proxy {
    address: SocketAddr,
    /// Answers that are still to be lost.
    left: Arc<AtomicUsize>,
}

impl Proxy {
    /// A proxy before the receiver at `port` that loses so many answers.
    pub(crate) fn losing(answers: usize, port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let left = Arc::new(AtomicUsize::new(answers));
        let shared = Arc::clone(&left);
        // Ends with the process, as do its connections.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let left = Arc::clone(&shared);
                std::thread::spawn(move || {
                    // A connection's end, whoever ends it, is not the proxy's.
                    let _ = pass(&client, port, &left);
                });
            }
        });
        Self { address, left }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/events", self.address)
    }

    /// Answers that were to be lost, and have not come yet.
    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }
}

/// Passes requests on, and answers back. The receiver has handled a request before it answers, so
/// what is lost is the answer only.
fn pass(client: &TcpStream, port: u16, left: &AtomicUsize) -> std::io::Result<()> {
    let receiver = TcpStream::connect(("127.0.0.1", port))?;
    let (mut from, mut to) = (client.try_clone()?, receiver.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let mut buffer = [0; 4096];
    loop {
        let read = (&receiver).read(&mut buffer)?;
        let take = |left: usize| left.checked_sub(1);
        let is_lost = read > 0
            && left
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
                .is_ok();
        if read == 0 || is_lost {
            client.shutdown(Shutdown::Both)?;
            return receiver.shutdown(Shutdown::Both);
        }
        (&mut &*client).write_all(&buffer[..read])?;
    }
}
