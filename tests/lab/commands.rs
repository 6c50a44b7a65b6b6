//! The commands as a newcomer uses them.

use crate::support::{binary, finish};

#[test]
fn the_help_of_each_command_mentions_its_options() {
    for (command, option) in [("demo", "--orders"), ("bench", "--json")] {
        let help = finish(binary(&[command, "--help"])).code(0).stdout;
        assert!(help.contains(option), "{command}: {help}");
        assert!(help.contains("help settings"), "{command}: {help}");
    }
}

/// R11: impossible values are refused by the name of the flag, before anything is done.
#[test]
fn a_number_beyond_its_limits_is_refused_with_them() {
    for (command, flag, value, why) in [
        ("demo", "--orders", "0", "from 1 to 100000"),
        (
            "bench ordered",
            "--keys",
            "1000000000",
            "from 1 to 10000000",
        ),
        (
            "bench ordered",
            "--zipf-keys",
            "1000000000",
            "from 0 to 10000000",
        ),
        ("bench drain", "--messages", "0", "from 1 to 100000000"),
        (
            "bench drain",
            "--behind-dead",
            "1000000000",
            "from 0 to 100000000",
        ),
        (
            "bench backlog",
            "--waiting",
            "10,1e9",
            "from 0 to 100000000",
        ),
        ("bench relays", "--processes", "1000", "from 1 to 64"),
        ("bench producers", "--clients", "100000", "from 1 to 1000"),
        ("bench page", "--rounds", "101", "from 1 to 100"),
        ("bench", "--rate", "1000000", "from 0 to 100000"),
        ("bench", "--paced-seconds", "86400", "from 0 to 3600"),
        ("bench", "--senders", "0", "from 1 to 1024"),
    ] {
        let given = format!("{flag}={value}");
        let arguments: Vec<&str> = command.split(' ').chain([given.as_str()]).collect();
        let refused = finish(binary(&arguments)).code(2).stderr;
        assert!(
            refused.contains(flag) && refused.contains(why),
            "{arguments:?}: {refused}"
        );
    }
}
