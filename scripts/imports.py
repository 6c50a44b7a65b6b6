"""Checks that imports only point down: fails if modules of a package use each other in a cycle, or if a file of the
library uses one in a room above (scripts/rooms.txt), or if the engine speaks of what it must not know (ABSENT), or if a
type name of the library stands in two files.

A module and its submodules are one unit. The units in a module must not use each other in a cycle, whichever of their
files do. A file uses what its paths lead to, in imports and in code: the file that defines the name, through any
re-exports. What a file uses of the modules around it is ignored, and so is code that only tests compile
(`#[cfg(test)]`). tree-sitter parses the files.
"""

import fnmatch
import re
import sys
from pathlib import Path

import tree_sitter
import tree_sitter_rust

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("src", "pages/src", "cli/src", "lab/src")
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))
OF_TESTS = re.compile(rb"cfg\((all\()?test\b")
ROOMS = ROOT / "scripts/rooms.txt"
# What no line of the engine says, in code, comments and tests; and names that stand for themselves.
ABSENT = re.compile(r"endpoint|customer|portal|webhook|verification|whsec", re.IGNORECASE)
PRESENT = re.compile(r"EndpointRefused|endpoint_refused|rename = \"endpoints\"|feature `endpoints`|EndpointTables|outbox_create_endpoints")
# A roster is a value: deciding what becomes of a message takes no lock, reads no clock and asks nobody.
ROSTER, NOT_A_VALUE = "endpoints/roster.rs", re.compile(r"Mutex|Atomic|clock::|Verifier")
COMMENTS = ("line_comment", "block_comment")
TYPES = ("struct_item", "enum_item", "trait_item", "type_item", "union_item")
# Type names that stand in two files: public ones of two modules, and what a build without HTTP has in their place.
IN_TWO_FILES = {"Connection", "Page", "Pause", "Verdict", "EndpointClients", "EndpointVerifier", "HttpDispatcher"}


def module_of(path, sources):
    """Returns `("engine", "send", "gate")` for src/engine/send/gate.rs."""
    parts = path.relative_to(sources).with_suffix("").parts
    return () if parts in (("lib",), ("main",)) else parts


def leaves(tree):
    """Yields (path, local name) of each leaf of a `use`: for `a::{b, c as d}`, a::b as b and a::c as d."""
    tree = tree.strip()
    if not tree.endswith("}"):
        path, _, name = tree.partition(" as ")
        parts = path.removesuffix("::self").split("::")
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


def paths(tokens):
    """Yields the paths of at least two names among the tokens: `a::b`."""
    path, is_open = [], False
    for token in [*tokens, ""]:
        if token == "::" and path and not is_open:
            is_open = True
        elif token.isidentifier() and (is_open or not path):
            path, is_open = [*path, token], False
        else:
            if len(path) > 1:
                yield path
            path, is_open = [token] if token.isidentifier() else [], False


class House:
    def __init__(self, sources):
        # For each module: its file, the names that it imports with their paths, and the paths in its code.
        self.files, self.imported, self.paths = {}, {}, {}
        # The files that define a type of this name.
        self.types = {}
        of_tests = set()
        # The `main` of a package that is also a library imports only the library.
        paths = [path for path in sources.rglob("*.rs") if path.name != "main.rs" or not (sources / "lib.rs").exists()]
        files = {module_of(path, sources): path for path in paths}
        for module in sorted(files, key=len):
            if not any(module[:end] in of_tests for end in range(len(module) + 1)):
                tree = PARSER.parse(files[module].read_bytes())
                of_tests.update(self.read(module, files[module], tree.root_node))

    def read(self, module, file, block):
        """Reads a module from its file. Returns the modules in it that only tests compile."""
        self.files[module] = file
        uses, tokens, of_tests = [], [], []

        def walk(node):
            is_of_tests = False
            for child in node.children:
                if child.type == "attribute_item":
                    is_of_tests |= bool(OF_TESTS.search(child.text))
                elif child.type in COMMENTS:
                    continue
                else:
                    name = child.child_by_field_name("name") if child.type == "mod_item" else None
                    inner = child.child_by_field_name("body") if name else None
                    below = (*module, name.text.decode()) if name else module
                    if is_of_tests:
                        of_tests.append(below if name else None)
                    elif inner:
                        of_tests.extend(self.read(below, file, inner))
                    elif child.type == "use_declaration":
                        uses.extend(leaves(child.child_by_field_name("argument").text.decode()))
                    elif child.children and not child.type.endswith("string_literal"):
                        # An associated type is a type of its trait.
                        if child.type in TYPES and getattr(node.parent, "type", "") not in ("impl_item", "trait_item"):
                            self.types.setdefault(child.child_by_field_name("name").text.decode(), set()).add(file)
                        walk(child)
                    else:
                        tokens.append(child.text.decode())
                    is_of_tests = False

        walk(block)
        self.imported[module] = {name: path for path, name in uses}
        self.paths[module] = [path for path, _ in uses] + list(paths(tokens))
        return of_tests

    def home(self, module, path, seen=frozenset()):
        """Returns the module that defines the item at this path; `None`: another crate does."""
        first, *rest = path
        if first in ("crate", "self", "super"):
            at = {"crate": (), "self": module, "super": module[:-1]}[first]
            while rest[:1] == ["super"]:
                at, rest = at[:-1], rest[1:]
        elif (*module, first) in self.files or first in self.imported[module]:
            at, rest = module, path
        else:
            return None
        while rest and (*at, rest[0]) in self.files:
            at, rest = (*at, rest[0]), rest[1:]
        further = self.imported[at].get(rest[0]) if rest else None
        if further is None or (at, rest[0]) in seen:
            return at
        return self.home(at, [*further, *rest[1:]], seen | {(at, rest[0])})

    def uses(self):
        """Yields (one file, another file whose name it uses, the name)."""
        for module, found in self.paths.items():
            for path in found:
                home = self.home(module, path)
                if home is not None and self.files[home] != self.files[module]:
                    yield self.files[module], self.files[home], path[-1]


def units(one, other):
    """Returns the units that contain the two modules, in the innermost module around both; `None`: one contains the other."""
    for end, (a, b) in enumerate(zip(one, other, strict=False), 1):
        if a != b:
            # The parts of the engine are one book: their files are units, and not their folders.
            if one[0] == other[0] == "engine" and end > 1:
                return ("engine", "/".join(one[1:])), ("engine", "/".join(other[1:]))
            return one[:end], other[:end]
    return None


def circles(arrows):
    """Returns the sets of nodes that lead to each other in a cycle."""

    def reached(start):
        found, left = set(), [start]
        while left:
            new = arrows.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    reach = {node: reached(node) for node in arrows}
    return {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in arrows} - {frozenset()}


class Rooms:
    """The rooms of the library, from top to bottom."""

    def __init__(self):
        lines = [line for line in ROOMS.read_text().splitlines() if line and not line.startswith("#")]
        rooms = [line.partition(":") for line in lines]
        self.names = list(dict.fromkeys(name for name, _, _ in rooms))
        self.patterns = [(name, pattern) for name, _, patterns in rooms for pattern in patterns.split()]

    def of(self, file):
        """Returns the room of a file, by its path below `src`; `None`: it is in none."""
        path = file.removesuffix(".rs")
        found = [(len(pattern), name) for name, pattern in self.patterns if fnmatch.fnmatch(path, pattern)]
        return max(found)[1] if found else None

    def upward(self, edges):
        """Returns which of these edges lead to a room above."""
        level = lambda file: self.names.index(self.of(file))
        return sorted((one, other) for one, other in edges if level(one) > level(other))


def spoken(file, words, but):
    """Yields the lines of a file in which words stand, apart from those of `but`."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if words.search(but.sub("", line)):
            yield f"{file.relative_to(ROOT / 'src')}:{number}: {line.strip()}"


def check_rooms(house):
    """Prints the files without a room, uses of rooms above, and words that the engine must not know. Returns whether all is
    well.
    """
    sources, rooms = ROOT / "src", Rooms()
    path = lambda file: str(file.relative_to(sources))
    faults = [f"{path(file)} is in no room of scripts/rooms.txt" for file in set(house.files.values()) if not rooms.of(path(file))]
    if not faults:
        uses = {(path(one), path(other)) for one, other, _ in house.uses()}
        # Those that call statements.
        acting = {one for one, other in uses if is_sql(other) and not is_sql(one)} - {"schema/tables.rs"}
        faults += [
            f"{one} -> {other}: SQL uses only plain values of its room"
            for one, other in uses
            if is_sql(one) and other in acting and rooms.of(one) == rooms.of(other)
        ]
        faults += [
            f"{one} -> {other}: a room uses only rooms below it ({rooms.of(one)}, {rooms.of(other)})"
            for one, other in rooms.upward(uses)
        ]
        for file in sources.glob("engine/**/*.rs"):
            faults += [f"{line}: the engine knows nothing of this" for line in spoken(file, ABSENT, PRESENT)]
        faults += [f"{line}: a roster is a value" for line in spoken(sources / ROSTER, NOT_A_VALUE, PRESENT)]
        faults += [
            f"{name} is a type of {', '.join(sorted(map(path, files)))}: a type name stands in one file"
            for name, files in house.types.items()
            if len({file for file in files if "simulation" not in path(file)}) > 1 and name not in IN_TWO_FILES
        ]
    for fault in sorted(faults):
        print(f"imports: {fault}", file=sys.stderr)
    return not faults


def is_sql(file):
    """Whether a file below `src` is in a folder `sql`, or such a folder's own."""
    return "sql" in file.removesuffix(".rs").split("/")


def check(package, house):
    """Prints the cycles of a package. Returns the number of its files, and whether it has a cycle. Between rooms their order
    is checked instead.
    """
    sources, rooms = ROOT / package, Rooms()
    room = lambda file: rooms.of(str(file.relative_to(sources))) if package == "src" else None
    arrows, names = {}, {}
    for one, other, name in house.uses():
        if room(one) == room(other) and (pair := units(module_of(one, sources), module_of(other, sources))):
            arrows.setdefault(pair[0], set()).add(pair[1])
            names.setdefault(pair, {}).setdefault((one, other), set()).add(name)
    found = sorted(map(sorted, circles(arrows)))
    for circle in found:
        print("imports: these modules use each other in a cycle:", ", ".join(map("::".join, circle)), file=sys.stderr)
        for pair in sorted(names):
            if pair[0] in circle and pair[1] in circle:
                for (one, other), used in sorted(names[pair].items()):
                    used = ", ".join(sorted(used))
                    print(f"  {one.relative_to(ROOT)} -> {other.relative_to(ROOT)}: {used}", file=sys.stderr)
    return len(set(house.files.values())), bool(found)


def main():
    houses = {package: House(ROOT / package) for package in PACKAGES}
    checked = [check(package, house) for package, house in houses.items()]
    if not check_rooms(houses["src"]) or any(has_cycle for _, has_cycle in checked):
        sys.exit(1)
    print(f"imports: {sum(files for files, _ in checked)} files, no cycle of modules, no use of a room above")


if __name__ == "__main__":
    main()
