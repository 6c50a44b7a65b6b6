//! A new endpoint gets what it would have got.

use super::SendingAct;
use crate::operate::sql::audit::Act;

/// Sends a new endpoint the messages of the time before it was there.
pub(super) static BACKFILL: SendingAct = SendingAct {
    name: "backfill",
    path: "/endpoints/{name}/backfill",
    about: "Send a new endpoint the messages since a time, oldest first",
    missing: None,
    act: Act::BackfillEndpoint,
    send: |endpoints, conn, name, sending, bulk| {
        endpoints.backfill(conn, name, sending.since, bulk)
    },
};
