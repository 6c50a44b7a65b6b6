//! A connection of libpq, because Diesel does not expose its socket and its notifications, and open descriptors of this
//! process by their numbers, which is how the sockets of Diesel's connections are found.
//!
//! The only `unsafe` code of the crate. Its invariants:
//! - `Pq::conn` comes from `PQconnectdb`, is not null, is used by one thread at a time (whatever changes it takes `&mut
//!   self`), and is freed once, by `Drop`.
//! - Each result and each notification is freed once, after its text is copied.
//! - Every text passed to libpq is a C string that lives during the call.
//! - A descriptor that is borrowed by its number is only asked and duplicated.

#![allow(
    unsafe_code,
    reason = "Diesel does not expose its socket and notifications, and a number is all that libpq tells"
)]

use std::ffi::{CStr, c_char, c_void};
use std::os::fd::{BorrowedFd, RawFd};

use pq_sys::{ConnStatusType, ExecStatusType, PGconn};

/// Asks an open descriptor of this process by its number.
pub(super) fn with_descriptor<T>(number: RawFd, ask: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
    // SAFETY: the number is not -1, because it comes from the list of open descriptors, or from libpq. `ask` does not close the
    // descriptor. Its owner may: then each call fails, or asks the descriptor that has the number now.
    ask(unsafe { BorrowedFd::borrow_raw(number) })
}

/// A connection, open or not.
pub(crate) struct Pq {
    conn: *mut PGconn,
}

// SAFETY: any thread may use a connection, one thread at a time, which `&mut self` ensures. It is not `Sync`.
unsafe impl Send for Pq {}

impl Pq {
    /// Connects; [`Pq::is_open`] says whether that went well. `None`: out of memory.
    pub(crate) fn connect(parameters: &CStr) -> Option<Self> {
        // SAFETY: `parameters` lives until the call returns.
        let conn = unsafe { pq_sys::PQconnectdb(parameters.as_ptr()) };
        if conn.is_null() {
            return None;
        }
        // SAFETY: `conn` is a connection, in any state. The notice processor needs no argument.
        unsafe { pq_sys::PQsetNoticeProcessor(conn, Some(ignore), std::ptr::null_mut()) };
        Some(Self { conn })
    }

    pub(crate) fn is_open(&self) -> bool {
        // SAFETY: `conn` is a connection.
        let status = unsafe { pq_sys::PQstatus(self.conn) };
        status == ConnStatusType::CONNECTION_OK
    }

    /// Asks the socket. `None`: the connection has none any more.
    pub(crate) fn with_socket<T>(&self, ask: impl FnOnce(BorrowedFd<'_>) -> T) -> Option<T> {
        // SAFETY: `conn` is a connection. It owns the socket, and nothing closes it while `self` is borrowed.
        let socket = unsafe { pq_sys::PQsocket(self.conn) };
        (socket >= 0).then(|| with_descriptor(socket, ask))
    }

    /// The server process, as the server named it when it greeted this client.
    pub(crate) fn greeted_by(&self) -> i32 {
        // SAFETY: `conn` is a connection.
        unsafe { pq_sys::PQbackendPID(self.conn) }
    }

    /// Sends statements. `false`: [`Pq::error`] says why not.
    pub(crate) fn send(&mut self, sql: &CStr) -> bool {
        // SAFETY: `conn` is a connection, `sql` lives until the call returns.
        unsafe { pq_sys::PQsendQuery(self.conn, sql.as_ptr()) == 1 }
    }

    /// Whether [`Pq::next_result`] would wait.
    pub(crate) fn is_busy(&mut self) -> bool {
        // SAFETY: `conn` is a connection.
        unsafe { pq_sys::PQisBusy(self.conn) == 1 }
    }

    /// The first value of the result of the next statement, or its error. `None`: there are no further results.
    pub(crate) fn next_result(&mut self) -> Option<Result<Option<String>, String>> {
        // SAFETY: `conn` is a connection. The result is freed here, after its text is copied.
        unsafe {
            let result = pq_sys::PQgetResult(self.conn);
            if result.is_null() {
                return None;
            }
            let first = match pq_sys::PQresultStatus(result) {
                ExecStatusType::PGRES_COMMAND_OK => Ok(None),
                ExecStatusType::PGRES_TUPLES_OK if pq_sys::PQntuples(result) > 0 => {
                    Ok(Some(text(pq_sys::PQgetvalue(result, 0, 0))))
                }
                ExecStatusType::PGRES_TUPLES_OK => Ok(None),
                _ => Err(self.error()),
            };
            pq_sys::PQclear(result);
            Some(first)
        }
    }

    /// Reads what the server has sent. `false`: [`Pq::error`] says why not.
    pub(crate) fn read(&mut self) -> bool {
        // SAFETY: `conn` is a connection.
        unsafe { pq_sys::PQconsumeInput(self.conn) == 1 }
    }

    /// Takes a notification from those that were read. `false`: there are no more.
    pub(crate) fn take_notification(&mut self) -> bool {
        // SAFETY: `conn` is a connection; a notification that is not null must be freed here.
        unsafe {
            let notification = pq_sys::PQnotifies(self.conn);
            if !notification.is_null() {
                pq_sys::PQfreemem(notification.cast::<c_void>());
            }
            !notification.is_null()
        }
    }

    /// The last error. It may contain the password.
    pub(crate) fn error(&self) -> String {
        // SAFETY: `conn` is a connection; the text is copied at once.
        unsafe { text(pq_sys::PQerrorMessage(self.conn)) }
    }
}

impl Drop for Pq {
    fn drop(&mut self) {
        // SAFETY: `conn` is a connection, and is not used afterwards.
        unsafe { pq_sys::PQfinish(self.conn) };
    }
}

/// Copies a text of libpq.
///
/// # Safety
/// `text` is null, or a C string that lives until the function returns.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees a C string that lives long enough.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Ignores notices, which libpq would write to standard error.
extern "C" fn ignore(_: *mut c_void, _: *const c_char) {}
