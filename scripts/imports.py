#!/usr/bin/env python3
"""Checks that imports only point down: fails if files of a package import each other in a cycle.

An import is a path that begins with `crate`, `super` or `self`. It leads to the file that defines the name,
through any re-exports. A module and its submodules count as one unit, so imports from an enclosing module are
ignored. Code that only tests compile (`#[cfg(test)]`) is ignored, too.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("src", "pages/src", "cli/src", "lab/src")
TEST_ITEM = re.compile(r"^( *)#\[cfg\(test\)\]\n(?:\1(?:#\[.*|//.*)\n)*(?:\1\S.*;\n|\1\S.*\n(?:.*\n)*?\1\}\n)", re.M)
TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\n(?:#\[.*\n)*(?:pub(?:\([a-z ]+\))? )?mod (\w+);")
COMMENT = re.compile(r"^\s*//.*$", re.M)
USE = re.compile(r"^ *(?:pub(?:\([a-z: ]+\))? )?use ([^;]+);", re.M)
PATH = re.compile(r"(?<![\w$:])(?:crate|super|self)(?:::\w+)+")


def module_of(path, sources):
    """Returns `("relay", "gate")` for src/relay/gate.rs."""
    parts = path.relative_to(sources).with_suffix("").parts
    return () if parts in (("lib",), ("main",)) else parts


def leaves(tree):
    """Yields (path, local name) of each leaf of a `use`: for `a::{b, c as d}`, a::b as b and a::c as d."""
    tree = tree.strip()
    if not tree.endswith("}"):
        path, _, name = tree.partition(" as ")
        parts = tuple(path.removesuffix("::self").split("::"))
        yield parts, name or parts[-1]
        return
    stem, _, inner = tree[:-1].partition("{")
    depth, start = 0, 0
    for at, char in enumerate(inner + ","):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            if inner[start:at].strip():
                yield from leaves(stem + inner[start:at].strip())
            start = at + 1


class House:
    def __init__(self, sources):
        # The `main` of a package that is also a library imports only the library.
        paths = [path for path in sources.rglob("*.rs") if path.name != "main.rs" or not (sources / "lib.rs").exists()]
        texts = {module_of(path, sources): path.read_text(encoding="utf-8") for path in paths}
        tests = {(*module, name) for module, text in texts.items() for name in TEST_MODULE.findall(text)}
        # For each module, the names that it imports and their paths.
        self.handed_on = {}
        self.paths = {}
        for module, text in texts.items():
            if any(module[:end] in tests for end in range(1, len(module) + 1)):
                continue
            code = COMMENT.sub("", TEST_ITEM.sub("", text))
            uses = [leaf for tree in USE.findall(code) for leaf in leaves(tree)]
            uses = [(self.absolute(module, path), name) for path, name in uses]
            self.handed_on[module] = {name: path for path, name in uses if path is not None}
            inline = [path.split("::") for path in PATH.findall(USE.sub("", code))]
            self.paths[module] = [path for path, _ in uses] + [self.absolute(module, path) for path in inline]

    def absolute(self, module, path):
        """Returns the path from the root of the crate; `None`: the path leads to another crate."""
        steps = list(path)
        if steps[0] not in ("crate", "super", "self"):
            return None
        if steps[0] == "crate":
            module = ()
        while steps and steps[0] in ("crate", "super", "self"):
            module = module[:-1] if steps.pop(0) == "super" else module
        return (*module, *steps)

    def home(self, path, seen=()):
        """Returns the module that defines the item at this path."""
        end = next(end for end in range(len(path), -1, -1) if path[:end] in self.paths)
        module, rest = path[:end], path[end:]
        further = self.handed_on[module].get(rest[0]) if rest else None
        if further is None or path in seen:
            return module
        return self.home((*further, *rest[1:]), (*seen, path))

    def imports(self):
        """Returns, for each module, the modules that it imports and the imported names."""
        arrows = {module: {} for module in self.paths}
        for module, paths in self.paths.items():
            for path in filter(None, paths):
                home = self.home(path)
                if home != module[: len(home)]:
                    arrows[module].setdefault(home, set()).add(path[-1])
        return arrows


def circles(arrows):
    """Returns the sets of modules that import each other in a cycle."""

    def reached(start):
        found, left = set(), [start]
        while left:
            new = set(arrows[left.pop()]) - found
            found |= new
            left += new
        return found

    reach = {module: reached(module) for module in arrows}
    return {frozenset(other for other in reach[module] if module in reach[other]) for module in arrows} - {frozenset()}


def check(package):
    """Prints the cycles of a package. Returns the number of its files, and whether it has a cycle."""

    def file_of(module):
        return Path(package, *(module or ("lib",))).with_suffix(".rs")

    arrows = House(ROOT / package).imports()
    found = sorted(map(sorted, circles(arrows)))
    for circle in found:
        print("imports: these files import each other in a cycle:", file=sys.stderr)
        for module in circle:
            for other in circle:
                if other in arrows[module]:
                    names = ", ".join(sorted(arrows[module][other]))
                    print(f"  {file_of(module)} -> {file_of(other)}: {names}", file=sys.stderr)
    return len(arrows), bool(found)


def main():
    checked = [check(package) for package in PACKAGES]
    if any(has_cycle for _, has_cycle in checked):
        sys.exit(1)
    print(f"imports: {sum(files for files, _ in checked)} files, no cycle")


if __name__ == "__main__":
    main()
