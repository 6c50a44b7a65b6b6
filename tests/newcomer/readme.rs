//! Splits README's library quick start into its parts.

pub(crate) const TEXT: &str = include_str!("../../README.md");

/// What a reader copies, in README's order.
pub(crate) struct QuickStart {
    pub(crate) new_project: String,
    /// The lines for Cargo.toml.
    pub(crate) dependencies: String,
    /// `main.rs`: the parts in order.
    pub(crate) program: String,
    pub(crate) receiver: String,
    pub(crate) run: String,
}

impl QuickStart {
    /// Fails if the section's parts are not the expected ones.
    pub(crate) fn read() -> Self {
        let (_, section) = TEXT
            .split_once("\n## Quick start: as a library\n")
            .expect("the heading");
        let (section, _) = section.split_once("\n## ").expect("the next heading");
        let blocks = code_blocks(section);
        let languages: Vec<&str> = blocks.iter().map(|(language, _)| *language).collect();
        assert_eq!(languages, ["sh", "toml", "rust", "rust", "sh", "sh"]);
        let text = |index: usize| blocks[index].1.to_owned();
        Self {
            new_project: text(0),
            dependencies: text(1),
            program: format!("{}\n{}", text(2), text(3)),
            receiver: text(4),
            run: text(5),
        }
    }
}

/// The fenced blocks: language and content.
fn code_blocks(section: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = section.split("```").collect();
    parts
        .chunks_exact(2)
        .map(|pair| {
            let (head, code) = pair[1].split_once('\n').expect("a fence ends its line");
            let language = head.split(',').next().unwrap_or_default();
            (language, code)
        })
        .collect()
}
