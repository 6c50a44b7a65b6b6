//! An endpoint gets messages again.

use super::{EndpointAct, of_shell};
use crate::operate::sql::audit::Act;

/// Enables an endpoint.
pub static ENABLE: EndpointAct = EndpointAct {
    name: "enable",
    done: "enabled",
    route: ("POST", "/endpoints/{name}/enable"),
    about: "Enable an endpoint: it gets new messages, and those that wait for it",
    becomes: |_, name| {
        format!(
            "New messages are addressed to it again. Those that wait for their next attempt keep its time: \
             `diesel-outbox message retry --destination {}` sends them now.",
            of_shell(name)
        )
    },
    undo: "`endpoint disable` disables it again.",
    ends: false,
    act: Act::EnableEndpoint,
    change: |endpoints, conn, name, _| endpoints.enable(conn, name),
};
