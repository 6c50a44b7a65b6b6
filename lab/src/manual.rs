//! Manual pages and shell completions from the definitions of the commands. `make manual` writes them for packages.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use diesel_outbox_cli::cli::Cli;

/// Options of `manual`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Folder to write into, created if it is missing
    folder: PathBuf,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let folder = &options.folder;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    for command in visible_commands() {
        let (name, text) = page(command)?;
        std::fs::write(folder.join(&name), text).with_context(|| format!("cannot write {name}"))?;
    }
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), "diesel-outbox", folder)
            .with_context(|| format!("cannot write the completions of {shell}"))?;
    }
    Ok(())
}

/// All commands that users see, each with its parent's name before its own.
fn visible_commands() -> Vec<Command> {
    let mut program = with_note(Cli::command())
        .disable_help_subcommand(true)
        .override_usage("diesel-outbox [OPTIONS] <COMMAND>")
        .mut_args(|arg| match arg.is_global_set() {
            // Of options that the short help leaves out, clap_mangen would show no text.
            true => arg.help_heading("Settings").hide_short_help(false),
            false => arg,
        });
    program.build();
    let mut commands = vec![program];
    let mut next = 0;
    while let Some(command) = commands.get(next) {
        let children = command
            .get_subcommands()
            .filter(|child| !child.is_hide_set());
        let children: Vec<_> = children.cloned().map(without_settings).collect();
        commands.extend(children);
        next += 1;
    }
    commands
}

/// Only the page of the program shows settings, the most used ones.
fn without_settings(command: Command) -> Command {
    with_note(command).mut_args(|arg| match arg.is_global_set() {
        true => arg.hide(true),
        false => arg,
    })
}

/// Says where all settings are.
fn with_note(command: Command) -> Command {
    let note = "Settings are flags of every command: `diesel-outbox help settings` shows all.";
    let after = match command.get_after_help() {
        Some(text) => format!("{text}\n\n{note}"),
        None => note.to_owned(),
    };
    command.after_help(after)
}

/// The file name and the text of a page.
fn page(command: Command) -> Result<(String, Vec<u8>)> {
    let page = Man::new(command).source(concat!("diesel-outbox ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render(&mut text)?;
    Ok((page.get_filename(), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages() -> Vec<(String, String)> {
        let commands = visible_commands().into_iter();
        let pages = commands.map(|command| page(command).expect("memory takes it"));
        pages
            .map(|(name, text)| (name, String::from_utf8(text).expect("UTF-8")))
            .collect()
    }

    #[test]
    fn the_manual_has_a_page_for_each_command() {
        let pages = pages();
        for name in [
            "diesel-outbox.1",
            "diesel-outbox-run.1",
            "diesel-outbox-dead-list.1",
        ] {
            assert!(pages.iter().any(|(page, _)| page == name), "{name}");
        }
        assert!(!pages.iter().any(|(page, _)| page.contains("help")));
    }

    #[test]
    fn no_page_repeats_all_settings_and_the_first_says_where_they_are() {
        for (name, text) in pages() {
            assert!(!text.contains("OUTBOX_SEND_TIMEOUT]"), "{name}");
            assert!(
                name != "diesel-outbox.1" || text.contains("help settings"),
                "{text}"
            );
        }
    }
}
