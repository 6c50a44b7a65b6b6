//! An endpoint gets no new messages.

use super::{EndpointAct, kept_for};
use crate::config::Config;
use crate::hand::Hand;
use crate::operate::acts::pause::OPERATOR;
use crate::operate::sql::audit::Act;

/// The most characters of a reason: its column has room for so many of any script.
const LONGEST_REASON: usize = 200;

/// Disables an endpoint.
pub static DISABLE: EndpointAct = EndpointAct {
    name: "disable",
    done: "disabled",
    route: ("POST", "/endpoints/{name}/disable"),
    about: "Disable an endpoint: it gets no new messages, and those already addressed to it wait. A pause lets new ones wait, \
            too",
    becomes: |config, _| while_disabled(config),
    undo: "`endpoint enable` enables it again.",
    ends: false,
    act: Act::DisableEndpoint,
    change: |endpoints, conn, name, why| {
        let why = match why {
            "" => match endpoints.get(conn, name)? {
                // The reason that an operator has given before stays.
                Some(one) if !one.enabled && one.disabled_by == Some(Hand::Operator) => {
                    one.disabled_reason.unwrap_or_else(|| OPERATOR.to_owned())
                }
                _ => OPERATOR.to_owned(),
            },
            why => why.chars().take(LONGEST_REASON).collect(),
        };
        endpoints.disable(conn, name, &why)
    },
};

/// What becomes of the messages of a disabled endpoint, with what the ledger of these settings keeps.
pub fn while_disabled(config: &Config) -> String {
    let missed = match kept_for(config) {
        Some(time) => format!("can be recovered for {time}"),
        None => "cannot be recovered: the ledger keeps no content".to_owned(),
    };
    format!(
        "New messages are not for the endpoint, and those already addressed to it wait. Messages of the time of the disablement {missed}."
    )
}
