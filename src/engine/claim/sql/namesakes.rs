//! Messages for a configured destination and a member of the same name. Both name the same destination; the
//! registration that a message is addressed to says which of the two is meant.

use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, NullableExpressionMethods};
use uuid::Uuid;

use crate::sql::functions::On;
use crate::sql::table::candidate;

/// Stands for a registration where a message is for a configured destination, although a member has its name.
pub(crate) const OF_ROUTE: Uuid = Uuid::nil();

/// What decides which messages a relay leaves to others because of their registrations.
// Why: docs/decisions.md#namesakes
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Namesakes {
    /// The destinations of this relay's settings.
    pub(crate) configured: Vec<String>,
    /// The registrations of the members that have one of these names.
    pub(crate) registered: Vec<Uuid>,
    /// The names of the members that other relays have in their settings, and this one has not.
    pub(crate) elsewhere: Vec<String>,
}

impl Namesakes {
    /// Whether a message that names this destination, and is addressed to this registration, is for other relays only.
    pub(crate) fn leave(&self, destination: &str, registration: Option<Uuid>) -> bool {
        let is_among = |names: &[String]| names.iter().any(|name| name == destination);
        match registration {
            None => is_among(&self.elsewhere),
            Some(OF_ROUTE) => !is_among(&self.configured),
            Some(id) => self.registered.contains(&id),
        }
    }
}

/// Whether the candidate is not left to other relays.
pub(super) fn is_not_left(namesakes: &Namesakes) -> On<'_, candidate::table> {
    let destination = candidate::destination;
    let id = candidate::registration.assume_not_null();
    let of_none = candidate::registration
        .is_null()
        .and(destination.ne_all(&namesakes.elsewhere));
    let of_route = id
        .eq(OF_ROUTE)
        .and(destination.eq_any(&namesakes.configured));
    let of_another = id.ne(OF_ROUTE).and(id.ne_all(&namesakes.registered));
    let of_one = candidate::registration
        .is_not_null()
        .and(of_route.or(of_another));
    Box::new(of_none.or(of_one))
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;
    use diesel::prelude::{QueryDsl, RunQueryDsl};

    use super::*;
    use crate::sql::tests::Outbox;

    /// R50: the condition of claims and that of the planner are the same.
    #[test]
    fn a_message_is_left_to_other_relays_by_its_name_and_its_registration() {
        let outbox = Outbox::new();
        let conn = &mut outbox.connect();
        let (ours, other) = (Uuid::from_u128(7), Uuid::from_u128(8));
        let namesakes = Namesakes {
            configured: vec!["mine".to_owned()],
            registered: vec![other],
            elsewhere: vec!["its".to_owned()],
        };
        conn.batch_execute(&format!(
            "INSERT INTO {} (topic, destination, registration, payload)
             SELECT 't', name, id, '1' FROM unnest(ARRAY['', 'mine', 'its', 'x']) name,
                    unnest(ARRAY[NULL, '{OF_ROUTE}', '{ours}', '{other}']::uuid[]) id",
            outbox.name.outbox()
        ))
        .expect("messages");
        let rows: Vec<(String, Option<Uuid>, bool)> = candidate::table(outbox.name.outbox())
            .select((
                candidate::destination,
                candidate::registration,
                is_not_left(&namesakes),
            ))
            .load(conn)
            .expect("rows");
        assert_eq!(rows.len(), 16);
        for (name, id, is_not_left) in &rows {
            assert_eq!(namesakes.leave(name, *id), !is_not_left, "{name} {id:?}");
        }
        let left = rows.iter().filter(|(.., is_not_left)| !is_not_left);
        // Without a registration, `its`; of the route, all but `mine`; and the other registration.
        assert_eq!(left.count(), 1 + 3 + 4);
    }
}
