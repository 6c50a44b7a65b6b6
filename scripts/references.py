#!/usr/bin/env python3
"""Checks what ARCHITECTURE.md, docs/failures.md and docs/decisions.md name: files, functions in files, types of the table
of words, and decisions.

`engine/claim/fate.rs` is a file below src/ or of the repository; `engine/claim/fate.rs::unsent` also names a word in that
file. A comment or page that cites `docs/decisions.md#two-clocks` needs the heading `two clocks`, and each decision must be
cited somewhere.
"""

import re
import subprocess
import sys
from pathlib import Path

ARCHITECTURE, FAILURES, DECISIONS = Path("ARCHITECTURE.md"), Path("docs/failures.md"), Path("docs/decisions.md")
# A file or folder, and a word in the file.
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w.-]+(?:\.(?:rs|md|py|toml|sql)|/))(?:::(\w+))?`")
# The settings of a relay, which users write.
NOT_OURS = {"outbox.toml"}
# The types of a word are in the last column: `Claim`, `Claimed`.
TYPES_OF_WORD = re.compile(r"^\| [^|`]+ \| .* \|((?: `[\w:]+`,?)+) \|$", re.MULTILINE)
CITED = re.compile(r"decisions\.md#([\w-]+)")


def lacks(page: Path) -> list[str]:
    """What a page names and nobody has."""
    found = []
    for path, word in NAMED.findall(page.read_text()):
        files = [file for file in (Path("src", path), Path(path)) if file.exists()]
        if path in NOT_OURS:
            continue
        if not files:
            found.append(f"{page}: no file {path}")
        elif word and not re.search(rf"\b{word}\b", files[0].read_text()):
            found.append(f"{page}: {files[0]} does not contain {word}")
    return found


def lacks_types(page: Path) -> list[str]:
    """The types of the table of words that the library has not."""
    code = "\n".join(file.read_text() for file in Path("src").rglob("*.rs"))
    words = page.read_text().partition("\n## Words\n")[2].partition("\n## ")[0]
    names = [name for row in TYPES_OF_WORD.findall(words) for name in re.findall(r"[\w:]+", row)]
    parts = [part for name in names for part in name.split("::")]
    assert len(parts) > 20, "the table of words has another form"
    return [f"{page}: no type {one}" for one in parts if not re.search(rf"\b(struct|enum|trait|type) {one}\b|^    {one}\b", code, re.MULTILINE)]


def citations() -> list[tuple[Path, str]]:
    """Who cites which decision."""
    listed = subprocess.run(["git", "ls-files", "*.rs", "*.md", "*.toml"], check=True, capture_output=True, text=True).stdout
    files = [file for file in map(Path, listed.splitlines()) if file.exists() and file != DECISIONS]
    return [(file, name) for file in files for name in CITED.findall(file.read_text())]


def main() -> int:
    headings = re.findall(r"^### (.+)$", DECISIONS.read_text(), re.MULTILINE)
    decisions = [heading.lower().replace(" ", "-") for heading in headings]
    cited = citations()
    wrong = [f"{DECISIONS}: two headings {one!r}" for one in sorted({one for one in decisions if decisions.count(one) > 1})]
    wrong += [f"{file}: no decision {name}" for file, name in cited if name not in decisions]
    unused = sorted(set(decisions) - {name for _, name in cited})
    wrong += [f"{DECISIONS}: nothing cites {one}: cite it where it holds, or remove it" for one in unused]
    for page in (ARCHITECTURE, FAILURES, DECISIONS):
        wrong += lacks(page)
    wrong += lacks_types(ARCHITECTURE)
    print("\n".join(wrong) or f"references: {len(decisions)} decisions", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
