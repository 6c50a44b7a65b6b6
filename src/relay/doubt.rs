//! Claims whose results were lost: the claim may have succeeded, failed, or may still be running in the server.

use crate::store::relay::backend::Backend;
use crate::store::relay::lease::LeaseId;

/// A claim whose result was lost, or a settle that the server has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Doubt {
    pub(crate) lease: LeaseId,
    pub(crate) ran_by: RanBy,
    /// The number of this doubt among all of this relay: a later one may have the same lease and process.
    pub(crate) number: u64,
}

/// The server process that ran a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RanBy {
    Process(Backend),
    /// It may be any process.
    Any,
    /// None of this server, which is another one than before.
    None,
}

impl From<Option<Backend>> for RanBy {
    /// The process is not known behind a pooler.
    fn from(backend: Option<Backend>) -> Self {
        backend.map_or(Self::Any, Self::Process)
    }
}

impl Doubt {
    /// Combines two doubts: the claimer and a settler can both lose a result, and two processes may still be running.
    pub(super) fn beside(self, before: Option<Self>) -> Self {
        let Some(before) = before.filter(|before| before.lease >= self.lease) else {
            return self;
        };
        // This doubt is about a statement that hung for long: its lease has ended, and its messages are taken over. Or
        // the earlier statement may be running in the server that has just been found to be another one.
        let number = self.number;
        if before.lease > self.lease || self.ran_by == RanBy::None {
            return Self { number, ..before };
        }
        let ran_by = match before.ran_by == self.ran_by || before.ran_by == RanBy::None {
            true => self.ran_by,
            false => RanBy::Any,
        };
        Self { ran_by, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_doubts_about_one_lease_no_process_is_forgotten() {
        let doubt = |lease, ran_by| Doubt {
            lease: LeaseId(lease),
            ran_by,
            number: 1,
        };
        let process = |pid| RanBy::Process(Backend { pid, started: 1 });
        let settler = doubt(1, process(10));
        assert_eq!(settler.beside(None), settler);
        assert_eq!(settler.beside(Some(settler)), settler);
        let any = doubt(1, RanBy::Any);
        assert_eq!(doubt(1, process(11)).beside(Some(settler)), any);
        assert_eq!(settler.beside(Some(any)), any);
        // The older lease has ended, and its messages are taken over.
        let newer = doubt(2, process(11));
        assert_eq!(newer.beside(Some(settler)), newer);
        let nobody = doubt(1, RanBy::None);
        assert_eq!(nobody.beside(Some(settler)), settler);
        assert_eq!(nobody.beside(Some(nobody)), nobody);
        assert_eq!(settler.beside(Some(nobody)), settler);
        // The same if the older lease is reported later.
        assert_eq!(settler.beside(Some(newer)), newer);
    }
}
