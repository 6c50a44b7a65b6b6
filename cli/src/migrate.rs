//! `diesel-outbox migrate`

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use diesel_outbox::Direction;
use diesel_outbox::admin;
use diesel_outbox::program::{self, EndpointTables};

use crate::output;
use crate::settings::SettingFlags;

/// Options of `migrate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Print the SQL for a migration of your own instead; needs no database
    #[arg(long)]
    print: bool,
    /// With --print: print the SQL that drops the outbox
    #[arg(long, requires = "print")]
    down: bool,
    /// With --print: print the SQL of roles with minimal rights, for enqueueing, relaying and reading
    #[arg(long, requires = "print", conflicts_with = "down")]
    roles: bool,
    /// Leave the tables of these parts out of an outbox that is created now. Without endpoints, it has no feeds, either
    #[arg(long, value_name = "PART", value_delimiter = ',', conflicts_with_all = ["with", "down"])]
    without: Vec<Part>,
    /// Add the tables of this part, also to an outbox that was created without them
    #[arg(long, value_name = "PART", conflicts_with = "down")]
    with: Option<Added>,
}

/// A part that an outbox may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Endpoints,
    Feeds,
}

/// A part that can be added to an outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Added {
    Endpoints,
    Feeds,
}

impl Options {
    fn endpoints(&self) -> EndpointTables {
        match self.with {
            Some(Added::Endpoints) => EndpointTables::Always,
            Some(Added::Feeds) => EndpointTables::Feeds,
            None if self.without.contains(&Part::Endpoints) => EndpointTables::Never,
            None if self.without.contains(&Part::Feeds) => EndpointTables::WithoutFeeds,
            None => EndpointTables::WithOutbox,
        }
    }
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    let endpoints = options.endpoints();
    if options.roles {
        return output::line(program::roles_sql(&config.table, endpoints).trim_end());
    }
    if options.print {
        let direction = if options.down {
            Direction::Down
        } else {
            Direction::Up
        };
        return output::line(
            program::migration_sql(direction, &config.table, endpoints).trim_end(),
        );
    }
    let mut conn = program::connect(config.database_url()?, "migrate", Duration::from_secs(300))?;
    let done = program::migrate(&mut conn, &config.table, endpoints)?;
    admin::check_schema(&mut conn, &config.table)?;
    if done.is_empty() {
        return output::line(format!("the outbox \"{}\" is up to date", config.table));
    }
    output::line(done.join("\n"))
}
