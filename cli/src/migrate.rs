//! `diesel-outbox migrate`

use std::time::Duration;

use anyhow::Result;
use diesel_outbox::Direction;
use diesel_outbox::{admin, program};

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
}

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    let config = settings.load()?;
    if options.roles {
        return output::line(program::roles_sql(&config.table).trim_end());
    }
    if options.print {
        let direction = if options.down {
            Direction::Down
        } else {
            Direction::Up
        };
        return output::line(admin::migration_sql(direction, &config.table).trim_end());
    }
    let mut conn = program::connect(config.database_url()?, "migrate", Duration::from_secs(300))?;
    let done = diesel_outbox::migrate(&mut conn, &config.table)?;
    admin::check_schema(&mut conn, &config.table)?;
    if done.is_empty() {
        return output::line(format!("the outbox \"{}\" is up to date", config.table));
    }
    output::line(done.join("\n"))
}
