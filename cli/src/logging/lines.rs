//! Log lines on their way to standard error. A thread of their own writes them, because a pipe that nobody reads blocks
//! whoever writes into it: a relay that settles nothing, and sends everything again after a restart.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes of lines that wait. Further lines are dropped.
const MOST_BYTES: usize = 1024 * 1024;
/// Lines that were dropped are followed by others once so little is waiting: otherwise, with a slow reader, every second
/// line would say that one was dropped.
const ENOUGH_ROOM: usize = MOST_BYTES / 2;
/// The wait before the next try to write to a full pipe that another process has made non-blocking.
const PIPE_PAUSE: Duration = Duration::from_millis(20);

/// The lines that wait for the thread that writes them.
pub(super) struct Lines {
    state: Mutex<State>,
    /// A line waits, or a line was written.
    changed: Condvar,
}

enum Entry {
    Line(Vec<u8>),
    /// So many lines are missing here.
    Dropped(u64),
}

struct State {
    waiting: VecDeque<Entry>,
    bytes: usize,
    is_writing: bool,
    /// The lines dropped since the last line that waits.
    dropped: u64,
    /// The lines dropped since the start.
    lost: u64,
}

impl State {
    fn add_dropped(&mut self) {
        match std::mem::take(&mut self.dropped) {
            0 => {}
            dropped => self.waiting.push_back(Entry::Dropped(dropped)),
        }
    }
}

impl Lines {
    pub(super) const fn new() -> Self {
        Self {
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                bytes: 0,
                is_writing: false,
                dropped: 0,
                lost: 0,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a line, or drops the line if there is no room. Never waits for the reader.
    pub(super) fn add(&self, line: &[u8]) {
        let mut state = self.lock();
        let most = match state.dropped {
            0 => MOST_BYTES,
            _ => ENOUGH_ROOM,
        };
        if state.bytes + line.len() > most {
            state.dropped += 1;
            state.lost += 1;
            return;
        }
        state.add_dropped();
        state.bytes += line.len();
        state.waiting.push_back(Entry::Line(line.to_vec()));
        self.changed.notify_all();
    }

    /// How many lines were dropped since the start.
    pub(super) fn lost(&self) -> u64 {
        self.lock().lost
    }

    /// Waits until all lines are written, but no longer than this.
    pub(super) fn flush(&self, longest: Duration) {
        let until = Instant::now() + longest;
        let mut state = self.lock();
        while state.is_writing || !state.waiting.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Writes lines for as long as the process lives. `note`: the line that says how many were dropped.
    pub(super) fn write_all(&self, note: impl Fn(u64) -> Vec<u8>) {
        // A descriptor of its own: the lock of Rust's standard error would block whoever else prints.
        let out = std::io::stderr().as_fd().try_clone_to_owned();
        let mut out = out.map(File::from);
        loop {
            let line = match self.next() {
                Entry::Line(line) => line,
                Entry::Dropped(dropped) => note(dropped),
            };
            let is_written = out.as_mut().is_ok_and(|out| is_written(out, &line));
            let mut state = self.lock();
            state.is_writing = false;
            state.lost += u64::from(!is_written);
            self.changed.notify_all();
        }
    }

    /// Waits for the next line.
    fn next(&self) -> Entry {
        let mut state = self.lock();
        loop {
            if let Some(entry) = state.waiting.pop_front() {
                if let Entry::Line(line) = &entry {
                    state.bytes -= line.len();
                }
                state.is_writing = true;
                return entry;
            }
            state.add_dropped();
            if state.waiting.is_empty() {
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Writes a line. `false`: nobody can read it any more.
fn is_written(out: &mut File, mut line: &[u8]) -> bool {
    while !line.is_empty() {
        match out.write(line) {
            Ok(0) => return false,
            Ok(written) => line = &line[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(PIPE_PAUSE),
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_dropped_and_counted_where_they_are_missing() {
        let lines = Lines::new();
        let long = vec![b'x'; MOST_BYTES / 4];
        let read = |entries: usize| {
            for _ in 0..entries {
                assert!(matches!(lines.next(), Entry::Line(line) if line == long));
            }
        };
        for _ in 0..7 {
            lines.add(&long);
        }
        assert_eq!(lines.lost(), 3);
        read(1);
        lines.add(&long);
        assert_eq!(lines.lost(), 4, "there is not enough room");
        read(2);
        lines.add(b"after");
        read(1);
        assert!(matches!(lines.next(), Entry::Dropped(4)));
        assert!(matches!(lines.next(), Entry::Line(line) if line == b"after"));
        assert_eq!(lines.lock().bytes, 0);
    }

    #[test]
    fn the_number_of_dropped_lines_needs_no_further_line() {
        let lines = Lines::new();
        lines.add(&vec![b'x'; MOST_BYTES]);
        lines.add(b"dropped");
        assert!(matches!(lines.next(), Entry::Line(_)));
        assert!(matches!(lines.next(), Entry::Dropped(1)));
    }

    #[test]
    fn a_flush_ends_in_time_without_a_writer() {
        let lines = Lines::new();
        lines.flush(Duration::from_secs(600));
        lines.add(b"a line");
        lines.flush(Duration::from_millis(10));
        assert_eq!(lines.lock().waiting.len(), 1);
    }
}
