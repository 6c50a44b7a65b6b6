//! Numbers of advisory locks. All share one space with the locks of leases and migrations.

use sha2::{Digest, Sha256};

/// The number of the lock with these names. Callers choose some of the names, and must not be able to choose the number of
/// somebody else's lock: PostgreSQL's own hashes can be inverted.
pub(crate) fn lock_number(names: &[&str]) -> i64 {
    let digest = names.iter().fold(Sha256::new(), |digest, name| {
        digest
            .chain_update((name.len() as u64).to_be_bytes())
            .chain_update(name)
    });
    let mut number = [0; 8];
    number.copy_from_slice(&digest.finalize()[..8]);
    i64::from_be_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R60: what is given as one name is no other list of names.
    #[test]
    fn each_list_of_names_has_a_number_of_its_own() {
        let lists: [&[&str]; 4] = [&["a", "b c"], &["a b", "c"], &["a b c"], &["a", "b", "c"]];
        for (at, one) in lists.iter().enumerate() {
            for other in &lists[at + 1..] {
                assert_ne!(lock_number(one), lock_number(other), "{one:?} {other:?}");
            }
        }
        assert_eq!(lock_number(&["a"]), lock_number(&["a"]));
    }
}
