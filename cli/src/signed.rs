//! `--who` and `--why`: options of the commands that change messages.

use clap::builder::NonEmptyStringValueParser;
use diesel_outbox::admin::Note;

/// The options with an optional reason.
#[derive(Debug, clap::Args)]
pub(crate) struct Signed {
    /// Reason for the change, recorded with it
    #[arg(long, value_name = "TEXT", default_value = "")]
    why: String,
    #[command(flatten)]
    who: Who,
}

/// The options with a required reason.
#[derive(Debug, clap::Args)]
pub(crate) struct SignedWithWhy {
    /// Reason for the change, recorded with it
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) why: String,
    #[command(flatten)]
    who: Who,
}

/// The option without a reason, for commands that have another option for it.
#[derive(Debug, clap::Args)]
pub(crate) struct Who {
    /// Name of the operator, recorded with the change [default: $USER or $LOGNAME]
    #[arg(long, value_name = "NAME")]
    who: Option<String>,
}

impl Signed {
    pub(crate) fn note(&self) -> Note {
        self.who.note(&self.why)
    }
}

impl SignedWithWhy {
    pub(crate) fn note(&self) -> Note {
        self.who.note(&self.why)
    }
}

impl Who {
    pub(crate) fn note(&self, why: &str) -> Note {
        Note::new(&self.name(), why)
    }

    pub(crate) fn name(&self) -> String {
        let of = |variable| std::env::var(variable).ok();
        let user = || of("USER").or_else(|| of("LOGNAME"));
        let who = self.who.clone().or_else(user);
        who.unwrap_or_else(|| "an operator".to_owned())
    }
}
