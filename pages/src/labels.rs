//! What endpoints are called. The portal gives them UUIDs as names, which tell a reader nothing.

use std::collections::{BTreeSet, HashMap};

use diesel::PgConnection;
use diesel_outbox::{DatabaseError, OutboxName, program};

/// Names of one page that are looked up.
const MOST: usize = 1000;

/// The URL and the description of endpoints, by name.
#[derive(Default)]
pub(crate) struct Labels(pub(crate) HashMap<String, (String, Option<String>)>);

impl Labels {
    /// Those of the endpoints among these.
    pub(crate) fn read<'n>(
        conn: &mut PgConnection,
        outbox: &OutboxName,
        names: impl Iterator<Item = &'n str>,
    ) -> Result<Self, DatabaseError> {
        let names: BTreeSet<&str> = names.take(MOST).collect();
        match names.is_empty() {
            true => Ok(Self::default()),
            false => {
                let names: Vec<&str> = names.into_iter().collect();
                program::called(conn, outbox, &names).map(Self)
            }
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}
