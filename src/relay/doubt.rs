//! Claims whose answers were lost.

use crate::store::relay::lease::LeaseId;

/// No process of a server has this number.
const NOBODY: i32 = 0;

/// A claim without an answer, or a settle that the server has forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Doubt {
    pub(crate) lease: LeaseId,
    /// The server's process that it ran in. `None`: it may be any.
    pub(crate) backend: Option<i32>,
}

impl Doubt {
    /// What was asked of the server before is not at work in this one.
    pub(super) fn of_another_server(lease: LeaseId) -> Self {
        Self {
            lease,
            backend: Some(NOBODY),
        }
    }

    /// The claimer and the settlers can lose their answers at once: then two processes may be at work.
    pub(super) fn beside(self, before: Option<Self>) -> Self {
        let Some(before) = before.filter(|before| before.lease >= self.lease) else {
            return self;
        };
        // A statement that hung for long: its lease is over, and what it held is taken over. Or it may be at work in
        // the server that was just found to be another one.
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
        let doubt = |lease, backend| Doubt {
            lease: LeaseId(lease),
            backend,
        };
        let settler = doubt(1, Some(10));
        assert_eq!(settler.beside(None), settler);
        assert_eq!(settler.beside(Some(settler)), settler);
        assert_eq!(doubt(1, Some(11)).beside(Some(settler)), doubt(1, None));
        assert_eq!(settler.beside(Some(doubt(1, None))), doubt(1, None));
        // That lease is over: what it held is taken over.
        assert_eq!(doubt(2, Some(11)).beside(Some(settler)), doubt(2, Some(11)));
        let nobody = Doubt::of_another_server(LeaseId(1));
        assert_eq!(nobody.beside(Some(settler)), settler);
        assert_eq!(nobody.beside(Some(nobody)), nobody);
        assert_eq!(settler.beside(Some(nobody)), settler);
        // Also where it is heard of late.
        assert_eq!(settler.beside(Some(doubt(2, Some(11)))), doubt(2, Some(11)));
    }
}
