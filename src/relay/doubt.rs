//! Claims whose results were lost: the claim may have succeeded, failed, or may still be running in the server.

use crate::store::relay::backend::Backend;
use crate::store::relay::lease::LeaseId;

/// No server process.
const NOBODY: Backend = Backend { pid: 0, started: 0 };

/// A claim whose result was lost, or a settle that the server has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Doubt {
    pub(crate) lease: LeaseId,
    /// The server process that ran the claim. `None`: it may be any process.
    pub(crate) backend: Option<Backend>,
}

impl Doubt {
    /// A doubt after the change to another server. No earlier statement is running in the new server.
    pub(super) fn of_another_server(lease: LeaseId) -> Self {
        Self {
            lease,
            backend: Some(NOBODY),
        }
    }

    /// Combines two doubts: the claimer and a settler can both lose a result, and two processes may still be running.
    pub(super) fn beside(self, before: Option<Self>) -> Self {
        let Some(before) = before.filter(|before| before.lease >= self.lease) else {
            return self;
        };
        // This doubt is about a statement that hung for long: its lease has ended, and its messages are taken over. Or
        // the earlier statement may be running in the server that has just been found to be another one.
        if before.lease > self.lease || self.backend == Some(NOBODY) {
            return before;
        }
        let is_one = [self.backend, Some(NOBODY)].contains(&before.backend);
        Self {
            backend: self.backend.filter(|_| is_one),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_doubts_about_one_lease_no_process_is_forgotten() {
        let doubt = |lease, backend: Option<i32>| Doubt {
            lease: LeaseId(lease),
            backend: backend.map(|pid| Backend { pid, started: 1 }),
        };
        let settler = doubt(1, Some(10));
        assert_eq!(settler.beside(None), settler);
        assert_eq!(settler.beside(Some(settler)), settler);
        assert_eq!(doubt(1, Some(11)).beside(Some(settler)), doubt(1, None));
        assert_eq!(settler.beside(Some(doubt(1, None))), doubt(1, None));
        // The older lease has ended, and its messages are taken over.
        assert_eq!(doubt(2, Some(11)).beside(Some(settler)), doubt(2, Some(11)));
        let nobody = Doubt::of_another_server(LeaseId(1));
        assert_eq!(nobody.beside(Some(settler)), settler);
        assert_eq!(nobody.beside(Some(nobody)), nobody);
        assert_eq!(settler.beside(Some(nobody)), settler);
        // The same if the older lease is reported later.
        assert_eq!(settler.beside(Some(doubt(2, Some(11)))), doubt(2, Some(11)));
    }
}
