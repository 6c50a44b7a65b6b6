#!/usr/bin/env python3
"""Finds phrases that read as translated, in everything that users and contributors read: prose, names of tests, and
identifiers.

Each phrase was in this repository once. CONTRIBUTING.md says how sentences are written here.
"""

import re
import subprocess
import sys
from pathlib import Path

# The pattern, and what to write instead.
PHRASES = {
    r"also none": "or none",
    r"\banew\b(?! = )": "again",
    r"by then": "until then",
    r"changes its mind": "changes",
    r"[Dd]ied to|[Mm]essages? (will )?dies?\b": "is dead-lettered",
    r"for life:": "for availability",
    r"goes? on\b": "continues",
    r"is given back|gives back": "releases",
    r"is (left|wants to be) (left )?alone": "stays unchanged; is asked to back off",
    r"is no matter": "is fine",
    r"is over\b|(time|lease) was over": "has expired, has ended",
    r"is told of|tells? of\b": "reports",
    r"of those that|what (waits|was claimed)": "the noun: waiting messages, claimed messages",
    r"so-manieth": "nth",
    r"under way": "in flight",
}
# What else names of tests and other identifiers must not have.
IN_IDENTIFIERS = {
    r"^what (?!if)": "the noun: a_failed_message_…",
    r"\bdie[sd]?\b|\bdeath\b": "is dead-lettered",
    r"\bnobodys?\b": "no relay, no others",
    r"\b(is|are|was) told\b": "is reported",
    r"\bgo on\b": "continue",
    r"\bgives? \w+ \w*\s?back\b|\bgive back\b": "releases, returns",
    r"\bones? that\b|\bthose that\b": "the noun",
}
IDENTIFIER = re.compile(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b")
# Identifiers are no prose.
NAMES = re.compile(r"`[^`]*`|\b\w*_\w*\b|\.\w+|\banew(?=[:),])")
READ = {".md", ".rs", ".sql", ".toml", ".yml", ".yaml", ".sh", ".service", ""}


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout
    paths = (Path(line) for line in listed.splitlines())
    return [path for path in paths if path.suffix in READ and path.is_file() and path.name != "Cargo.lock"]


def phrases(path: Path, line: str):
    """Each phrase in the line, and what to write instead."""
    for pattern, instead in PHRASES.items():
        if match := re.search(pattern, NAMES.sub("", line)):
            yield match[0], instead
    if path.suffix == ".rs":
        for identifier in IDENTIFIER.findall(line):
            for pattern, instead in (PHRASES | IN_IDENTIFIERS).items():
                if re.search(pattern, identifier.replace("_", " ")):
                    yield identifier, instead


def main() -> int:
    found = 0
    for path in files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for phrase, instead in phrases(path, line):
                found += 1
                print(f"{path}:{number}: {phrase!r}: write {instead}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
