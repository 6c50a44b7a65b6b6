//! The pauses that a relay has read, by what they pause.

use std::collections::HashMap;

use uuid::Uuid;

use super::sql::pause::{Pausable, Paused};

/// The pauses of the table, by what they pause.
pub(crate) struct Pauses<'a> {
    pub(crate) of_destinations: HashMap<&'a str, Vec<&'a Paused>>,
    pub(crate) of_tenants: HashMap<Uuid, &'a Paused>,
}

pub(super) fn of_kind(rows: &[Paused], kind: Pausable) -> impl Iterator<Item = &Paused> {
    rows.iter().filter(move |row| row.kind == kind.as_str())
}

impl<'a> Pauses<'a> {
    pub(crate) fn of(rows: &'a [Paused]) -> Self {
        let mut of_destinations: HashMap<&str, Vec<&Paused>> = HashMap::new();
        for row in of_kind(rows, Pausable::Destination) {
            of_destinations.entry(&row.name).or_default().push(row);
        }
        let tenants = of_kind(rows, Pausable::Tenant).filter(|row| row.is_on());
        let of_tenants = tenants.filter_map(|row| Some((row.name.parse().ok()?, row)));
        Self {
            of_destinations,
            of_tenants: of_tenants.collect(),
        }
    }

    pub(crate) fn of_tenant(&self, tenant: Option<Uuid>) -> Option<&'a Paused> {
        self.of_tenants.get(&tenant?).copied()
    }

    /// The pauses of a destination: its own, and that of its tenant.
    pub(crate) fn of_both(
        &self,
        name: &str,
        tenant: Option<Uuid>,
    ) -> impl Iterator<Item = &'a Paused> {
        let own = self.of_destinations.get(name).into_iter().flatten();
        own.copied().chain(self.of_tenant(tenant))
    }
}
