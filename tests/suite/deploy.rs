//! The files of `deploy/`, checked against the program and the guide. scripts/check-deploy runs other tools on them.

use std::path::Path;

use crate::commands::With;
use crate::support::{Database, File, binary, finish};

const MANIFEST: &str = include_str!("../../deploy/kubernetes/diesel-outbox.yaml");
const DOCKERFILE: &str = include_str!("../../deploy/container/Dockerfile");

/// The lines that are indented below this line of YAML.
fn block_of<'a>(yaml: &'a str, line: &str) -> Vec<&'a str> {
    let mut lines = yaml.lines().skip_while(|other| other.trim() != line);
    let indent = |line: &str| line.len() - line.trim_start().len();
    let margin = indent(lines.next().expect("the line is there"));
    lines
        .take_while(|line| line.is_empty() || indent(line) > margin)
        .map(|line| line.get(margin + 2..).unwrap_or_default())
        .collect()
}

#[test]
fn the_settings_of_the_kubernetes_example_are_good() {
    let database = Database::new();
    let settings = File::new(&block_of(MANIFEST, "outbox.toml: |").join("\n"));
    let token = File::new("0123456789abcdef0123456789abcdef");
    let secret = File::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    let checked = finish(
        database
            .binary(&["check"])
            .with("OUTBOX_CONFIG", settings.path())
            .with("OUTBOX_ADMIN_TOKEN_FILE", token.path())
            .with("OUTBOX_SECRET_FILE", secret.path()),
    );
    let checked = checked.code(0);
    assert!(
        checked.stdout.contains("billing.example"),
        "{}",
        checked.stdout
    );
}

#[test]
fn the_guide_shows_the_container_file_as_it_is() {
    let page = include_str!("../../docs/deploying.md");
    let shown = page
        .split("```dockerfile\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next())
        .expect("a block");
    let file: String = DOCKERFILE
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with(['#', ' ']))
        .filter(|line| !line.starts_with("LABEL"))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_eq!(shown, file);
}

/// An operator who is woken by an alert types the commands that it shows.
#[test]
fn the_commands_of_the_guide_and_of_alerts_are_there() {
    let texts = [
        include_str!("../../docs/destination-down.md"),
        include_str!("../../docs/find-a-message.md"),
        include_str!("../../docs/change-messages.md"),
        include_str!("../../docs/delete-data.md"),
        include_str!("../../docs/watch.md"),
        include_str!("../../docs/problems.md"),
        include_str!("../../docs/doctor.md"),
        include_str!("../../docs/admin-page.md"),
        include_str!("../../docs/failing-endpoints.md"),
        include_str!("../../deploy/prometheus/diesel-outbox.rules.yml"),
        include_str!("../../deploy/grafana/diesel-outbox.json"),
    ];
    let mut commands = std::collections::BTreeSet::new();
    for text in texts.map(|text| text.split_whitespace().collect::<Vec<_>>()) {
        for (place, word) in text.iter().enumerate() {
            let next = |n| {
                text.get(place + n)
                    .map_or("", |word: &&str| word.trim_matches(NO_WORD))
            };
            let name = word.trim_start_matches(NO_WORD);
            // At the end of a code span or a sentence, the name is the program itself.
            if name == "diesel-outbox" && next(1).chars().all(|c| c.is_ascii_lowercase()) {
                let has_more = ["dead", "message", "pause", "resume"].contains(&next(1));
                let more = if has_more { next(2) } else { "--help" };
                commands.insert(vec![next(1), more, "--help"]);
            }
        }
    }
    assert!(commands.len() > 10, "{commands:?}");
    for command in commands {
        finish(binary(&command)).code(0);
    }
}

/// Punctuation around a word in prose.
const NO_WORD: [char; 8] = ['`', '(', ')', ',', '.', ';', ':', '"'];

/// `make test` runs two groups of test programs at once.
#[test]
fn every_test_program_is_in_one_group() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let text = |path: &str| std::fs::read_to_string(root.join(path)).expect("a file");
    let makefile = text("Makefile");
    let others = "--test '[!bcn]*'";
    assert!(makefile.contains(others));
    let mut count = 0;
    for manifest in ["cli/Cargo.toml", "lab/Cargo.toml"] {
        let manifest = text(manifest);
        for after in manifest.split("[[test]]").skip(1) {
            let name = after.split('"').nth(1).expect("a name");
            let is_beside = makefile.contains(&format!("--test {name} "));
            assert_eq!(is_beside, name.starts_with(['b', 'c', 'n']), "{name}");
            count += 1;
        }
    }
    assert!(count >= 7, "{count}");
}

#[test]
fn every_package_that_a_script_installs_is_known() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let known = std::fs::read_to_string(root.join("scripts/install-package")).expect("a script");
    let scripts = std::fs::read_dir(root.join("scripts")).expect("a folder");
    let others = scripts.map(|entry| entry.expect("a file").path());
    let mut installed = 0;
    for path in others.chain([root.join("Makefile"), root.join(".ci/run")]) {
        let text = std::fs::read_to_string(&path).expect("a script");
        for after in text.split("install-package").skip(1) {
            let after = after.trim_start_matches('"');
            let Some(name) = after
                .strip_prefix(' ')
                .and_then(|rest| rest.split_whitespace().next())
            else {
                continue;
            };
            let name = name.trim_end_matches([';', ')']);
            if name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            {
                assert!(
                    known.contains(&format!("1:{name} ")) || known.contains(&format!("1:{name})")),
                    "{name} of {path:?}"
                );
                installed += 1;
            }
        }
    }
    assert!(installed >= 10, "{installed}");
}
