//! Acts that the library lists: each is a subcommand.

use std::fmt;

use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};

/// A list of acts.
pub(crate) trait List: 'static {
    /// One of them.
    type Act: Copy;
    /// The options of each.
    type Options: Args + fmt::Debug;

    /// All of them.
    fn acts() -> impl Iterator<Item = Self::Act>;

    /// The name of the subcommand.
    fn name(act: Self::Act) -> &'static str;

    /// The subcommand with the words of the act.
    fn describe(act: Self::Act, command: Command) -> Command;
}

/// The act that the subcommand names, with its options.
pub(crate) struct Listed<L: List> {
    pub(crate) act: L::Act,
    pub(crate) options: L::Options,
}

impl<L: List> fmt::Debug for Listed<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", L::name(self.act), self.options)
    }
}

impl<L: List> FromArgMatches for Listed<L> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let named = matches.subcommand();
        let named = named.and_then(|(name, options)| {
            let act = L::acts().find(|act| L::name(*act) == name)?;
            Some((act, options))
        });
        let kind = clap::error::ErrorKind::InvalidSubcommand;
        let (act, options) = named.ok_or_else(|| Error::raw(kind, "there is no such act\n"))?;
        let options = L::Options::from_arg_matches(options)?;
        Ok(Self { act, options })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<L: List> Subcommand for Listed<L> {
    fn augment_subcommands(command: Command) -> Command {
        // Described after the options, whose type has words of its own.
        let one = |act| L::describe(act, L::Options::augment_args(Command::new(L::name(act))));
        command.subcommands(L::acts().map(one))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        L::acts().any(|act| L::name(act) == name)
    }
}
