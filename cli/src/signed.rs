//! Who decides something, and why: options of the commands that change messages.

use clap::builder::NonEmptyStringValueParser;
use diesel_outbox::admin::Note;

/// Why may be left out.
#[derive(Debug, clap::Args)]
pub(crate) struct Signed {
    /// Why, for whoever looks at it later
    #[arg(long, value_name = "TEXT", default_value = "")]
    why: String,
    #[command(flatten)]
    who: Who,
}

/// Why has to be said.
#[derive(Debug, clap::Args)]
pub(crate) struct SignedWithWhy {
    /// Why, for whoever looks at it later
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    why: String,
    #[command(flatten)]
    who: Who,
}

#[derive(Debug, clap::Args)]
struct Who {
    /// Who decides it; without it the user of this machine
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
    fn note(&self, why: &str) -> Note {
        let of = |variable| std::env::var(variable).ok();
        let user = || of("USER").or_else(|| of("LOGNAME"));
        let who = self.who.clone().or_else(user);
        Note::new(&who.unwrap_or_else(|| "an operator".to_owned()), why)
    }
}
