//! The options of an endpoint: a flag of `endpoint put` for each.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use diesel_outbox::ConfigError;
use diesel_outbox::config::{DeliveryPolicy, Verification};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::program::{PolicyOption, SETTINGS};

/// The given options, with their values.
#[derive(Debug, Clone, Default)]
pub(super) struct PolicyFlags {
    given: Vec<(&'static PolicyOption, String)>,
}

impl PolicyFlags {
    /// The flag of the option, if it is given.
    pub(super) fn flag(&self, name: &str) -> Option<String> {
        let mut given = self.given.iter().map(|(option, _)| option);
        let option = given.find(|option| option.name == name)?;
        Some(format!("--{}", flag_of(option)))
    }

    /// Sets the given options.
    pub(super) fn apply(&self, policy: &mut DeliveryPolicy) -> Result<(), ConfigError> {
        self.given.iter().try_for_each(|(option, text)| {
            let flag = format!("--{}", flag_of(option));
            option.set(policy, &flag, text.as_str())
        })
    }
}

/// `max-attempts` for `max_attempts`.
fn flag_of(option: &PolicyOption) -> String {
    option.name.replace('_', "-")
}

/// The id of the flag. A setting with the flag of an option is global: with its id, `put` takes the place of the setting.
fn id_of(option: &PolicyOption) -> &'static str {
    let variable = format!("OUTBOX_{}", option.name.to_uppercase());
    let mut settings = SETTINGS.iter().map(|setting| setting.variable);
    settings.find(|one| *one == variable).unwrap_or(option.name)
}

/// Whether `put` takes the flag of this variable for an option of the endpoint.
pub(super) fn is_option(variable: &str) -> bool {
    PolicyOption::of_endpoints().any(|option| id_of(option) == variable)
}

impl Args for PolicyFlags {
    fn augment_args(command: Command) -> Command {
        PolicyOption::of_endpoints().fold(command, |command, option| {
            let default = match option.registered_default() {
                None | Some("") => String::new(),
                Some(default) => format!(" [default: {default}]"),
            };
            command.arg(
                Arg::new(id_of(option))
                    .long(flag_of(option))
                    .value_name(option.value_name)
                    // The option refuses negative numbers, and says what it accepts.
                    .allow_negative_numbers(true)
                    .help(format!("{}{default}", option.help)),
            )
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for PolicyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let given = |option| {
            let value = matches.get_one::<String>(id_of(option))?;
            Some((option, value.clone()))
        };
        self.given = PolicyOption::of_endpoints().filter_map(given).collect();
        Ok(())
    }
}

/// The values that can be cleared.
pub(super) fn fields() -> Vec<String> {
    let own = [
        "topics",
        "tenant",
        "filter",
        "headers",
        "auth",
        "verification",
        "description",
    ];
    let own = own.into_iter().map(str::to_owned);
    own.chain(PolicyOption::of_endpoints().map(flag_of))
        .collect()
}

/// Gives a value its default.
pub(super) fn clear(one: &mut Endpoint, field: &str) {
    match field {
        "topics" => one.topics = vec!["*".to_owned()],
        "tenant" => one.tenant_id = None,
        "filter" => one.filter = None,
        "headers" => one.headers.clear(),
        "auth" => one.auth = None,
        "verification" => one.verification = Verification::None,
        "description" => one.description = None,
        option => {
            if let Some(option) = PolicyOption::named(&option.replace('-', "_")) {
                option.clear(&mut one.policy);
            }
        }
    }
}
