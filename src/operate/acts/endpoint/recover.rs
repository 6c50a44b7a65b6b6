//! An endpoint gets its dead letters, and what it missed.

use super::SendingAct;
use crate::operate::sql::audit::Act;

/// Sends the dead letters of an endpoint again.
pub static RECOVER: SendingAct = SendingAct {
    name: "recover",
    path: "/endpoints/{name}/recover",
    about: "Send an endpoint its dead letters since a time again, oldest first",
    missing: Some(
        "Also the messages that the endpoint wants, and missed while it was disabled or not there",
    ),
    act: Act::RecoverEndpoint,
    send: |endpoints, conn, name, sending, bulk| {
        endpoints.recover(conn, name, sending.since, sending.what, bulk)
    },
};
