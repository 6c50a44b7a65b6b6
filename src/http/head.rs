//! The head of a response. Once the status has arrived, nothing that follows changes what the receiver said.
//!
//! ureq refuses a whole response because of one odd line, although the receiver may have accepted the message.
//! [`Head`] reads line by line, keeps the few fields that matter, and writes a new head for ureq.

use std::time::Duration;

/// The most bytes of a head that are read. A head that is longer counts as complete.
const MOST_BYTES: usize = 256 * 1024;
/// The most bytes of a line whose value is read. It must fit into the input buffer of a connection.
const LONGEST_LINE: usize = 8 * 1024;
/// The most spaces before a status.
const MOST_SPACES: usize = 8;
/// The fields whose first value is kept.
const KEPT: [&str; 8] = [
    "retry-after",
    "date",
    "ratelimit-reset",
    "x-ratelimit-reset",
    "ratelimit",
    "location",
    "webhook-allowed-origin",
    "webhook-allowed-rate",
];
/// The most bytes that are kept of each of them.
const LONGEST_VALUE: usize = 512;

/// The head of a response, as far as it has arrived.
// Why: docs/decisions.md#ureq
#[derive(Debug, Default)]
pub(super) struct Head {
    place: HeadPlace,
    bytes: usize,
    status: Status,
    fields: Fields,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum HeadPlace {
    #[default]
    Status,
    /// In a line of which the rest does not matter.
    RestOfLine,
    Fields,
    End,
}

/// What has arrived of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Part,
    Whole,
    NotHttp,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Status {
    minor_version: u8,
    /// 0: has not arrived.
    code: u16,
}

#[derive(Debug, Default)]
struct Fields {
    length: Option<u64>,
    is_chunked: bool,
    /// Nobody can tell where the body ends.
    has_bad_framing: bool,
    /// A line is malformed: the connection must not be used again.
    is_odd: bool,
    closes: bool,
    keeps_alive: bool,
    idle: Option<Duration>,
    /// In the order of [`KEPT`].
    kept: [Vec<u8>; KEPT.len()],
    has_challenge: bool,
    /// The field that a folded line continues.
    last: Option<HeadField>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadField {
    Length,
    Encoding,
    Connection,
    KeepAlive,
    Challenge,
    /// The number in [`KEPT`].
    Kept(usize),
}

impl HeadField {
    fn of(name: &[u8]) -> Option<Self> {
        let known = [
            ("content-length", Self::Length),
            ("transfer-encoding", Self::Encoding),
            ("connection", Self::Connection),
            ("keep-alive", Self::KeepAlive),
            ("proxy-authenticate", Self::Challenge),
        ];
        let is_name = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
        let found = known.iter().find(|(known, _)| is_name(known));
        let found = found.map(|(_, field)| *field);
        found.or_else(|| KEPT.iter().position(|known| is_name(known)).map(Self::Kept))
    }
}

impl Head {
    /// Whether the status of the final response has arrived.
    pub(super) fn has_status(&self) -> bool {
        self.status.code != 0 && !self.status.is_interim()
    }

    /// How long the receiver keeps an idle connection open.
    pub(super) fn idle(&self) -> Option<Duration> {
        self.fields.idle
    }

    /// Reads what has arrived. Returns how many bytes are read: the rest is to be given again, with more. Interim
    /// responses are passed over.
    pub(super) fn read(&mut self, input: &[u8]) -> (usize, Progress) {
        let before = self.bytes;
        let mut used = 0;
        let progress = loop {
            let rest = &input[used..];
            if self.place == HeadPlace::End {
                break Progress::Whole;
            }
            if self.place == HeadPlace::Status {
                if let Some(blank) = blank_line(rest) {
                    used += blank;
                    continue;
                }
                match status_line(rest) {
                    StatusLine::Part => break Progress::Part,
                    StatusLine::NotHttp => break Progress::NotHttp,
                    StatusLine::Of(status) => self.status = status,
                }
                self.place = HeadPlace::RestOfLine;
            }
            let end = memchr::memchr(b'\n', rest);
            match (end, self.place) {
                (Some(end), HeadPlace::RestOfLine) => {
                    used += end + 1;
                    self.place = HeadPlace::Fields;
                }
                (Some(end), _) => {
                    used += end + 1;
                    self.line(rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]));
                }
                (None, place) => {
                    if place == HeadPlace::RestOfLine || rest.len() > LONGEST_LINE {
                        used = input.len();
                        self.place = HeadPlace::RestOfLine;
                    }
                    break Progress::Part;
                }
            }
        };
        self.bytes = before + used;
        if progress == Progress::Part && self.has_status() && self.bytes > MOST_BYTES {
            self.cut();
            return (used, Progress::Whole);
        }
        (used, progress)
    }

    /// The connection must not be used again, and what follows is not waited for if its length is unknown.
    pub(super) fn close(&mut self) {
        let fields = &mut self.fields;
        fields.closes = true;
        fields.has_bad_framing |= fields.length.is_none() && !fields.is_chunked;
    }

    /// No more of the head arrives, or it is too long.
    pub(super) fn cut(&mut self) {
        self.place = HeadPlace::End;
        self.close();
        self.fields.length = Some(0);
        self.fields.is_chunked = false;
        self.fields.has_bad_framing = false;
    }

    fn line(&mut self, line: &[u8]) {
        if !line.is_empty() {
            return self.fields.line(line);
        }
        self.place = match self.status.is_interim() {
            true => HeadPlace::Status,
            false => HeadPlace::End,
        };
        if self.status.is_interim() {
            self.status = Status::default();
            self.fields = Fields::default();
        }
    }

    /// Writes the head for ureq. `arrived` is how many bytes of the body have arrived.
    pub(super) fn write(&self, to: &mut Vec<u8>, arrived: usize) {
        let Status {
            minor_version,
            code,
        } = self.status;
        let fields = &self.fields;
        let length = match fields.has_bad_framing {
            true => u64::try_from(arrived).ok(),
            false => fields.length,
        };
        let closes = fields.closes || fields.is_odd || fields.has_bad_framing;
        let mut add = |text: &[u8]| to.extend_from_slice(text);
        add(b"HTTP/1.");
        add(&[b'0' + minor_version, b' ']);
        let mut digits = [0; 20];
        add(decimal(code.into(), &mut digits));
        add(b"\r\n");
        if fields.is_chunked && !fields.has_bad_framing {
            add(b"transfer-encoding: chunked\r\n");
        }
        if let Some(length) = length {
            add(b"content-length: ");
            add(decimal(length, &mut digits));
            add(b"\r\n");
        }
        if closes {
            add(b"connection: close\r\n");
        } else if fields.keeps_alive {
            add(b"connection: keep-alive\r\n");
        }
        if fields.has_challenge {
            add(b"proxy-authenticate: any\r\n");
        }
        for (name, value) in KEPT.iter().zip(&fields.kept) {
            if !value.is_empty() {
                add(name.as_bytes());
                add(b": ");
                add(value);
                add(b"\r\n");
            }
        }
        add(b"\r\n");
    }
}

impl Fields {
    fn line(&mut self, line: &[u8]) {
        // Without a way out of the loop, so that many bytes are compared at once.
        let is_odd = |byte: &u8| byte.is_ascii_control() && *byte != b'\t';
        self.is_odd |= line.iter().fold(false, |any, byte| any | is_odd(byte));
        if line.starts_with(b" ") || line.starts_with(b"\t") {
            self.is_odd = true;
            if let Some(field) = self.last {
                self.value(field, line.trim_ascii());
            }
            return;
        }
        let Some(colon) = memchr::memchr(b':', line) else {
            self.is_odd = true;
            self.last = None;
            return;
        };
        let name = line[..colon].trim_ascii_end();
        self.is_odd |= name.is_empty() || name.len() < colon;
        self.last = HeadField::of(name);
        if let Some(field) = self.last {
            self.value(field, line[colon + 1..].trim_ascii());
        }
    }

    fn value(&mut self, field: HeadField, value: &[u8]) {
        if field == HeadField::Challenge {
            self.has_challenge = true;
        }
        // The value may be in the next line.
        if value.is_empty() {
            return;
        }
        let items = || value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        let has = |item: &str| items().any(|one| one.eq_ignore_ascii_case(item.as_bytes()));
        match field {
            HeadField::Length => {
                for item in items() {
                    match (number(item), self.length) {
                        (Some(length), None) => self.length = Some(length),
                        (Some(length), Some(before)) if length == before => {}
                        _ => self.has_bad_framing = true,
                    }
                }
            }
            HeadField::Encoding if has("chunked") => self.is_chunked = true,
            HeadField::Encoding => self.has_bad_framing |= !has("identity"),
            HeadField::Connection => {
                self.closes |= has("close");
                self.keeps_alive |= has("keep-alive");
            }
            HeadField::KeepAlive => {
                let seconds = |item: &[u8]| number(item.strip_prefix(b"timeout=")?);
                let timeout = items().find_map(|item| seconds(&item.to_ascii_lowercase()));
                self.idle = timeout.map(Duration::from_secs).or(self.idle);
            }
            HeadField::Kept(number) if self.kept[number].is_empty() => {
                self.kept[number] = kept(value)
            }
            HeadField::Kept(_) | HeadField::Challenge => {}
        }
    }
}

/// The text of a value, as far as it is kept.
fn kept(value: &[u8]) -> Vec<u8> {
    let is_text = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    let text = value.iter().copied().filter(is_text);
    text.take(LONGEST_VALUE).collect()
}

fn number(text: &[u8]) -> Option<u64> {
    let is_number = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| is_number)?;
    text.parse().ok()
}

/// The number in decimal digits.
fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut first = digits.len();
    loop {
        first -= 1;
        digits[first] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[first..];
        }
    }
}

/// The length of an empty line at the beginning.
fn blank_line(input: &[u8]) -> Option<usize> {
    [b"\n".as_slice(), b"\r\n"]
        .into_iter()
        .find(|line| input.starts_with(line))
        .map(<[u8]>::len)
}

/// The beginning of a status line.
#[derive(Debug, PartialEq, Eq)]
enum StatusLine {
    Part,
    NotHttp,
    Of(Status),
}

impl Status {
    /// 101 is final: the receiver speaks another protocol from then on.
    fn is_interim(self) -> bool {
        matches!(self.code, 100 | 102..=199)
    }
}

fn status_line(input: &[u8]) -> StatusLine {
    const PREFIX: &[u8] = b"HTTP/1.";
    if !PREFIX.starts_with(&input[..input.len().min(PREFIX.len())]) && input != b"\r" {
        return StatusLine::NotHttp;
    }
    let Some((version, rest)) = input
        .get(PREFIX.len()..)
        .and_then(|rest| rest.split_first())
    else {
        return StatusLine::Part;
    };
    let spaces = rest.iter().take(MOST_SPACES);
    let spaces = spaces.take_while(|byte| **byte == b' ').count();
    let digits = &rest[spaces..];
    let count = digits.iter().take_while(|byte| byte.is_ascii_digit());
    let count = count.count();
    let has_end = matches!(digits.get(count), Some(b' ' | b'\t' | b'\r' | b'\n'));
    let is_part = digits.len() == count && count <= 3;
    match number(&digits[..count]).and_then(|code| u16::try_from(code).ok()) {
        _ if !version.is_ascii_digit() => StatusLine::NotHttp,
        _ if is_part && (spaces > 0 || rest.is_empty()) => StatusLine::Part,
        Some(code @ 100..=999) if spaces > 0 && has_end => StatusLine::Of(Status {
            minor_version: u8::from(*version != b'0'),
            code,
        }),
        _ => StatusLine::NotHttp,
    }
}

/// The status of a head that has arrived as a whole.
pub(super) fn status_of(head: &[u8]) -> Option<u16> {
    match status_line(head) {
        StatusLine::Of(status) => Some(status.code),
        StatusLine::Part | StatusLine::NotHttp => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head for ureq, and the bytes that follow. Reads pieces of `size` bytes.
    fn read_in_pieces(answer: &[u8], size: usize) -> Option<(String, Vec<u8>)> {
        let mut head = Head::default();
        let mut buffer: Vec<u8> = Vec::new();
        let mut pieces = answer.chunks(size);
        let mut progress = Progress::Part;
        while progress == Progress::Part {
            let Some(piece) = pieces.next() else {
                head.has_status().then(|| head.cut())?;
                buffer.clear();
                break;
            };
            buffer.extend_from_slice(piece);
            let used;
            (used, progress) = head.read(&buffer);
            buffer.drain(..used);
        }
        if progress == Progress::NotHttp {
            return None;
        }
        assert!(head.place == HeadPlace::End && head.has_status());
        let mut written = Vec::new();
        head.write(&mut written, buffer.len());
        pieces.for_each(|piece| buffer.extend_from_slice(piece));
        Some((String::from_utf8(written).expect("ASCII"), buffer))
    }

    #[track_caller]
    fn assert_head(answer: impl AsRef<[u8]>, head: &str) {
        let answer = answer.as_ref();
        for size in [1, 2, 7, answer.len()] {
            let (found, _) = read_in_pieces(answer, size).expect("a status");
            assert_eq!(found, format!("HTTP/1.{head}\r\n"), "{size}");
        }
    }

    #[test]
    fn ordinary_heads_keep_what_matters() {
        assert_head("HTTP/1.1 204 No Content\r\n\r\n", "1 204\r\n");
        assert_head(
            "\r\nHTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 2\r\n\r\nok",
            "1 200\r\ncontent-length: 2\r\n",
        );
        assert_head(
            "HTTP/1.0 503\nconnection: Keep-Alive\nretry-after: 30.5\n\n",
            "0 503\r\nconnection: keep-alive\r\nretry-after: 30.5\r\n",
        );
        assert_head(
            "HTTP/1.1 407 ?\r\nproxy-authenticate: Basic\r\ntransfer-encoding: chunked\r\n\r\n",
            "1 407\r\ntransfer-encoding: chunked\r\nproxy-authenticate: any\r\n",
        );
        assert_head("HTTP/1.1 101 Other\r\n\r\n", "1 101\r\n");
    }

    #[test]
    fn the_first_status_that_is_not_interim_decides_whatever_follows() {
        let close = "1 200\r\ncontent-length: 2\r\nconnection: close\r\n";
        for line in [
            "x-a: 1\r\n folded",
            "x-a : 1",
            "x-a: \u{1}",
            "no colon",
            ": no name",
            "x-a: \0",
        ] {
            let answer = format!("HTTP/1.1 200 OK\r\n{line}\r\ncontent-length: 2\r\n\r\nok");
            assert_head(answer, close);
        }
        let interim = "HTTP/1.1 100 Continue\r\nx-a: 1\r\ncontent-length: 7\r\n\r\n";
        let many: String = (0..150).map(|n| format!("x-{n}: {n}\r\n")).collect();
        for before in [interim.to_owned(), interim.repeat(3)] {
            let answer = format!("{before}HTTP/1.1 200 OK\r\n{many}content-length: 2\r\n\r\nok");
            assert_head(answer, "1 200\r\ncontent-length: 2\r\n");
        }
        let long = format!("x-a: {}\r\n", "a".repeat(70_000));
        let answer = format!("HTTP/1.1 200 OK\r\n{long}content-length: 2\r\n\r\nok");
        let (head, body) = read_in_pieces(answer.as_bytes(), 16 * 1024).expect("a status");
        assert_eq!(head, "HTTP/1.1 200\r\ncontent-length: 2\r\n\r\n");
        assert_eq!(body, b"ok");
    }

    #[test]
    fn a_head_that_breaks_off_or_does_not_end_has_its_status_and_no_body() {
        let cut = "1 200\r\ncontent-length: 0\r\nconnection: close\r\n";
        for answer in [
            "HTTP/1.1 200 ",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 100\r\nx-a",
        ] {
            assert_head(answer, cut);
        }
        for endless in ["x-a: b\r\n", "a"] {
            let answer = format!("HTTP/1.1 200 OK\r\n{}", endless.repeat(MOST_BYTES));
            let (head, _) = read_in_pieces(answer.as_bytes(), 4096).expect("a status");
            assert_eq!(head, format!("HTTP/1.{cut}\r\n"));
        }
    }

    #[test]
    fn without_a_known_end_only_what_has_arrived_is_the_body() {
        for framing in [
            "content-length: 1\r\ncontent-length: 2",
            "content-length: -1",
            "content-length: 99999999999999999999",
            "transfer-encoding: gzip",
        ] {
            let answer = format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\nok");
            let (head, body) = read_in_pieces(answer.as_bytes(), 1000).expect("a status");
            let expected = "HTTP/1.1 200\r\ncontent-length: 2\r\nconnection: close\r\n\r\n";
            assert_eq!(
                (head.as_str(), body.as_slice()),
                (expected, b"ok".as_slice())
            );
        }
        assert_head(
            "HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nok",
            "1 200\r\ncontent-length: 2\r\n",
        );
    }

    #[test]
    fn a_folded_value_is_read() {
        let answer = "HTTP/1.1 503 No\r\nretry-after:\r\n 30\r\ncontent-length : 0\r\n\r\n";
        let fields = "content-length: 0\r\nconnection: close\r\nretry-after: 30\r\n";
        assert_head(answer, &format!("1 503\r\n{fields}"));
    }

    #[test]
    fn the_time_that_a_receiver_keeps_idle_connections_is_read() {
        let mut head = Head::default();
        head.read(b"HTTP/1.1 200 OK\r\nKeep-Alive: max=100, Timeout=5\r\n\r\n");
        assert_eq!(head.idle(), Some(Duration::from_secs(5)));
    }

    #[test]
    fn statuses_are_read_from_the_first_line() {
        assert_eq!(status_of(b"HTTP/1.1 200 OK\r\n\r\n"), Some(200));
        assert_eq!(status_of(b"HTTP/1.0  407\r\n\r\n"), Some(407));
        for line in [
            "220 mail.example",
            "HTTP/2 200 OK",
            "HTTP/1.x 200 OK",
            "HTTP/1.1\r\n",
            "HTTP/1.1 20\r\n",
            "HTTP/1.1 2000 OK",
            "HTTP/1.1 099 OK",
            "SSH-2.0",
            "HTTP/1.1 abc",
            "HTTP/1.1           ",
        ] {
            assert_eq!(status_line(line.as_bytes()), StatusLine::NotHttp, "{line}");
        }
        for part in ["", "HT", "HTTP/1.", "HTTP/1.1", "HTTP/1.1 ", "HTTP/1.1 20"] {
            assert_eq!(status_line(part.as_bytes()), StatusLine::Part, "{part}");
        }
    }
}
