//! Log lines of a relay's threads. A thread of each relay passes them to the application's logger, so that a logger that is
//! slow, hangs, or asks the relay about itself holds up no thread that sends, records, renews the lease or stops, and is
//! never called under a lock.
//!
//! Lines of other threads, such as those of the application, go to the logger directly.
//!
//! Why: docs/decisions.md#log-thread

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ::log::kv::{self, Key, ToValue, Value, VisitSource};
pub(crate) use ::log::{Level, max_level};
use ::log::{Log, Metadata, Record};
use crossbeam_channel::{Receiver, Sender, bounded, select};

/// The most lines that wait for the logger.
const MOST_LINES: usize = 4096;
/// How long a thread waits for a logger that is slow. After that, lines are dropped until the logger continues.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long the last lines of a relay may take.
pub(crate) const LONGEST_FLUSH: Duration = Duration::from_secs(1);

macro_rules! error_line {
    ($($line:tt)+) => { ::log::error!(logger: $crate::log::ByThread, $($line)+) };
}
macro_rules! warn_line {
    ($($line:tt)+) => { ::log::warn!(logger: $crate::log::ByThread, $($line)+) };
}
macro_rules! info_line {
    ($($line:tt)+) => { ::log::info!(logger: $crate::log::ByThread, $($line)+) };
}
macro_rules! debug_line {
    ($($line:tt)+) => { ::log::debug!(logger: $crate::log::ByThread, $($line)+) };
}
macro_rules! any_line {
    ($($line:tt)+) => { ::log::log!(logger: $crate::log::ByThread, $($line)+) };
}
pub(crate) use any_line as log;
pub(crate) use debug_line as debug;
pub(crate) use error_line as error;
pub(crate) use info_line as info;
pub(crate) use warn_line as warn;

thread_local! {
    static QUEUE: RefCell<Option<Queue>> = const { RefCell::new(None) };
}

/// Takes each line to the queue of the thread, or without one to the logger.
pub(crate) struct ByThread;

impl Log for ByThread {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ::log::logger().enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        let queue = QUEUE.with_borrow(Clone::clone);
        match queue {
            None => ::log::logger().log(record),
            Some(queue) if self.enabled(record.metadata()) => queue.add(LogLine::of(record)),
            Some(_) => {}
        }
    }

    fn flush(&self) {}
}

/// The lines of a relay on their way to the logger.
#[derive(Clone)]
pub(crate) struct Queue(Arc<WaitingLines>);

struct WaitingLines {
    lines: (Sender<LogLine>, Receiver<LogLine>),
    /// The lines dropped since the last line that the logger got.
    dropped: AtomicU64,
    is_closed: AtomicBool,
}

/// Ends the use of a queue by this thread, when dropped.
#[must_use]
pub(crate) struct Entered(Option<Queue>);

impl Drop for Entered {
    fn drop(&mut self) {
        QUEUE.set(self.0.take());
    }
}

impl Queue {
    pub(crate) fn new() -> Self {
        Self(Arc::new(WaitingLines {
            lines: bounded(MOST_LINES),
            dropped: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
        }))
    }

    /// From now on, the lines of this thread wait in this queue, until the result is dropped.
    pub(crate) fn enter(&self) -> Entered {
        let is_open = !self.0.is_closed.load(Ordering::Acquire);
        Entered(QUEUE.replace(is_open.then(|| self.clone())))
    }

    fn add(&self, line: LogLine) {
        let WaitingLines { lines, dropped, .. } = &*self.0;
        let is_added = match dropped.load(Ordering::Relaxed) {
            0 => lines.0.send_timeout(line, PATIENCE).is_ok(),
            _ => lines.0.try_send(line).is_ok(),
        };
        if !is_added {
            dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Passes lines to the logger until `open` is disconnected and no line is left.
    pub(crate) fn pass_on(&self, open: &Receiver<()>) {
        let WaitingLines { lines, dropped, .. } = &*self.0;
        loop {
            select! {
                recv(lines.1) -> line => {
                    if let Ok(line) = line {
                        line.pass_on();
                    }
                },
                recv(open) -> _ => break,
            }
            let count = dropped.swap(0, Ordering::Relaxed);
            if count > 0 {
                ::log::warn!(event = "log_dropped", lines = count; "dropped {count} lines of the log: the application's logger is too slow");
            }
        }
        lines.1.try_iter().for_each(LogLine::pass_on);
    }

    /// Later lines go to the logger directly.
    pub(crate) fn close(&self) {
        self.0.is_closed.store(true, Ordering::Release);
    }
}

/// What a line says, apart from the thread that has said it.
struct LogLine {
    level: Level,
    target: String,
    module: Option<&'static str>,
    file: Option<&'static str>,
    number: Option<u32>,
    text: String,
    pairs: Pairs,
}

impl LogLine {
    fn of(record: &Record<'_>) -> Self {
        let mut pairs = Pairs(Vec::new());
        // The visitor never fails.
        let _ = record.key_values().visit(&mut pairs);
        Self {
            level: record.level(),
            target: record.target().to_owned(),
            module: record.module_path_static(),
            file: record.file_static(),
            number: record.line(),
            text: record.args().to_string(),
            pairs,
        }
    }

    fn pass_on(self) {
        // A logger that panics has said so by the panic hook, and gets the next line.
        let _ = catch_unwind(AssertUnwindSafe(|| self.log()));
    }

    fn log(self) {
        ::log::logger().log(
            &Record::builder()
                .level(self.level)
                .target(&self.target)
                .module_path_static(self.module)
                .file_static(self.file)
                .line(self.number)
                .key_values(&self.pairs)
                .args(format_args!("{}", self.text))
                .build(),
        );
    }
}

struct Pairs(Vec<(String, Pair)>);

enum Pair {
    Natural(u64),
    Whole(i64),
    Switch(bool),
    Number(f64),
    Text(String),
}

impl<'kvs> VisitSource<'kvs> for Pairs {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), kv::Error> {
        let pair = if let Some(number) = value.to_u64() {
            Pair::Natural(number)
        } else if let Some(number) = value.to_i64() {
            Pair::Whole(number)
        } else if let Some(switch) = value.to_bool() {
            Pair::Switch(switch)
        } else if let Some(number) = value.to_f64() {
            Pair::Number(number)
        } else {
            Pair::Text(value.to_string())
        };
        self.0.push((key.to_string(), pair));
        Ok(())
    }
}

impl ToValue for Pair {
    fn to_value(&self) -> Value<'_> {
        match self {
            Self::Natural(number) => number.to_value(),
            Self::Whole(number) => number.to_value(),
            Self::Switch(switch) => switch.to_value(),
            Self::Number(number) => number.to_value(),
            Self::Text(text) => text.as_str().to_value(),
        }
    }
}

impl kv::Source for Pairs {
    fn visit<'kvs>(&'kvs self, visitor: &mut dyn VisitSource<'kvs>) -> Result<(), kv::Error> {
        let mut pairs = self.0.iter();
        pairs.try_for_each(|(key, pair)| visitor.visit_pair(Key::from_str(key), pair.to_value()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn files_below(folder: &Path, all: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            match entry.path() {
                path if path.is_dir() => files_below(&path, all),
                path => all.push(path),
            }
        }
    }

    /// A file without `use crate::log` would call the logger of the application itself.
    #[test]
    fn every_file_of_the_relay_that_logs_does_so_by_this_module() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = vec![
            source.join("dispatch.rs"),
            source.join("http.rs"),
            source.join("builder.rs"),
        ];
        for folder in [
            "engine",
            "endpoints",
            "operate",
            "builder",
            "http",
            "dispatch",
            "handlers",
        ] {
            files_below(&source.join(folder), &mut files);
        }
        for file in files {
            let text = std::fs::read_to_string(&file).expect("a file");
            let logs = ["error!(", "warn!(", "info!(", "debug!(", "log!("];
            if logs.iter().any(|log| text.contains(&format!("log::{log}"))) {
                assert!(text.contains("use crate::log"), "{}", file.display());
            }
        }
    }

    fn line(text: &str) -> LogLine {
        LogLine::of(&Record::builder().args(format_args!("{text}")).build())
    }

    #[test]
    fn a_logger_that_hangs_is_waited_for_once() {
        let queue = Queue::new();
        for _ in 0..MOST_LINES {
            queue.add(line("fits"));
        }
        let began = std::time::Instant::now();
        for _ in 0..100 {
            queue.add(line("dropped"));
        }
        assert!(began.elapsed() < 50 * PATIENCE, "{:?}", began.elapsed());
        assert_eq!(queue.0.dropped.load(Ordering::Relaxed), 100);
    }

    #[test]
    fn a_line_keeps_what_it_says() {
        let pairs = [
            ("event", Value::from("settled")),
            ("messages", Value::from(7_u64)),
            ("offset", Value::from(-7_i64)),
            ("is_last", Value::from(true)),
            ("seconds", Value::from(0.5)),
        ];
        let line = LogLine::of(
            &Record::builder()
                .level(Level::Warn)
                .target("a target")
                .args(format_args!("{} messages", 7))
                .key_values(&pairs)
                .build(),
        );
        assert_eq!(
            (line.level, line.target.as_str()),
            (Level::Warn, "a target")
        );
        assert_eq!(line.text, "7 messages");
        let mut again = Pairs(Vec::new());
        kv::Source::visit(&line.pairs, &mut again).expect("visited");
        let shown: Vec<_> = (again.0.iter())
            .map(|(key, pair)| format!("{key}={}", pair.to_value()))
            .collect();
        let expected = [
            "event=settled",
            "messages=7",
            "offset=-7",
            "is_last=true",
            "seconds=0.5",
        ];
        assert_eq!(shown, expected);
    }
}
