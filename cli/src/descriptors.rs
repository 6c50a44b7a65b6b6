//! The limit of open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of this process as far as the system allows. Each connection to a receiver needs a descriptor, and
/// the usual limit of 1,024 is meant for programs that use `select`.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::warn!(event = "descriptors_limited", error:% = error; "cannot raise the limit of open files ({error}): the relay opens fewer connections to receivers at once");
    }
}
