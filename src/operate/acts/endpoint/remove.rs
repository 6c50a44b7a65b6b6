//! An endpoint, its secret and its waiting messages end.

use super::EndpointAct;
use crate::operate::sql::audit::Act;

/// Removes an endpoint.
pub static REMOVE: EndpointAct = EndpointAct {
    name: "remove",
    done: "removed",
    route: ("DELETE", "/endpoints/{name}"),
    about: "Remove an endpoint; its waiting messages end as cancelled ones do, and leave no dead letters",
    becomes: |_, _| {
        "Messages that wait for it end unsent in the ledger, as cancelled ones do, when they are due (DESTINATION_REMOVED), and \
         leave no dead letters. Its secret is deleted; the tokens of a feed end, and nobody reads its events any more."
            .to_owned()
    },
    undo: "To restore it, register the same name, give the receiver the new secret, or the readers of a feed a new token, and send what it missed: `endpoint recover \
           --missing`, if the ledger keeps payloads.",
    ends: true,
    act: Act::RemoveEndpoint,
    change: |endpoints, conn, name, _| endpoints.remove(conn, name),
};
