#!/usr/bin/env python3
"""Prints which tests cover which requirement, from tests/requirements.md and the doc comments of tests.

Fails if a requirement has no test, or if a test names an unknown requirement.
A test covers the requirements in its doc comment (`R6`, `G4`), or the acceptance scenario in its name (`w_101_…`).
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ID = re.compile(r"\b(?:R\d{1,2}|G[1-6]|W-10\d|T-\d)\b")
ROW = re.compile(r"^\| (\S+) \| .* \|$")


def requirements():
    """Returns the ids in the order of the table."""
    text = (ROOT / "tests/requirements.md").read_text(encoding="utf-8")
    return [row[1] for row in map(ROW.match, text.splitlines()) if row and ID.fullmatch(row[1])]


def tests():
    """Yields (file, name, ids) of each test function."""
    folders = ("tests", "src", "pages/src", "pages/tests", "cli/src", "lab/src")
    for path in sorted(path for folder in folders for path in ROOT.glob(f"{folder}/**/*.rs")):
        doc, is_test = [], False
        for line in map(str.strip, path.read_text(encoding="utf-8").splitlines()):
            function = re.match(r"(?:pub(?:\([a-z]+\))? )?fn (\w+)", line)
            if line.startswith("///"):
                doc.append(line)
            elif line.startswith("#["):
                is_test |= line == "#[test]"
            else:
                if function and is_test:
                    scenario = re.match(r"(w_10\d|t_\d)_", function[1])
                    named = set(ID.findall(" ".join(doc)))
                    if scenario:
                        named.add(scenario[1].upper().replace("_", "-"))
                    yield path.relative_to(ROOT), function[1], named
                doc, is_test = [], False


def main():
    shown = {requirement: [] for requirement in requirements()}
    problems = []
    for path, name, named in tests():
        for requirement in sorted(named):
            if requirement in shown:
                shown[requirement].append((path, name))
            else:
                problems.append(f"{path}: {name} names {requirement}, which is not in tests/requirements.md")
    for requirement, found in shown.items():
        first = f"{found[0][0]}: {found[0][1]}" if found else "NO TEST"
        print(f"{requirement:6} {len(found):3}  {first}")
        if not found:
            problems.append(f"{requirement} has no test")
    for problem in problems:
        print(f"requirements: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
