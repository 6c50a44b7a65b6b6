"""Finds public functions, methods and macros that no documentation example calls.

An example counts if it is in the documentation of the item itself, of its type or trait, or of its module.
Hidden lines and examples that are not compiled do not count. Trait implementations, variants and hidden
items need no example.
"""

import re

FENCE = re.compile(r"^\s*```(.*)$")
# Words after the fence of a code block that rustdoc compiles.
COMPILED = {"", "rust", "no_run", "should_panic", "edition2024"}


def without_example(document, ignored):
    """Returns the paths of items that no example calls, and the number of items checked.

    Skips paths that match the pattern `ignored`.
    """
    shown = Shown(document)
    missing, looked_at = [], 0
    for path, item, owner in shown.callables():
        if ignored.search(path):
            continue
        looked_at += 1
        if not shown.is_called(path, item, owner):
            missing.append(path)
    return sorted(missing), looked_at


class Shown:
    """The examples shown with each public item, from the JSON of rustdoc."""

    def __init__(self, document):
        self.index = document["index"]
        # The shortest public path of each item of this crate.
        self.public = {}
        root = str(document["root"])
        self.name_items(root, "")
        self.by_path = {path: identity for identity, path in self.public.items()}
        self.by_path[""] = root

    def name_items(self, module, path):
        """Assigns a public path to each item that the module defines or re-exports."""
        for child in map(str, self.index[module]["inner"]["module"]["items"]):
            item = self.index[child]
            if item["visibility"] != "public":
                continue
            used = item["inner"].get("use")
            name = used["name"] if used else item["name"]
            if used:
                child = str(used["id"])
                if child not in self.index:
                    continue
                item = self.index[child]
            known = self.public.get(child)
            if known is None or known.count("::") > path.count("::") + 1:
                self.public[child] = f"{path}{name}"
            if "module" in item["inner"]:
                self.name_items(child, f"{path}{name}::")

    def callables(self):
        """Yields the path, the item and the owner (if any) of everything that can be called."""
        for identity, path in self.public.items():
            item = self.index[identity]
            ((kind, value),) = item["inner"].items()
            if kind in ("function", "macro"):
                yield path, item, None
            elif kind == "trait":
                yield from self.functions(path, item, value["items"])
            elif kind in ("struct", "enum"):
                for implementation in value["impls"]:
                    implementation = self.index.get(str(implementation))
                    if implementation is None or implementation["inner"]["impl"]["trait"]:
                        continue
                    yield from self.functions(path, item, implementation["inner"]["impl"]["items"])

    def functions(self, path, owner, members):
        for member in members:
            member = self.index[str(member)]
            if "function" in member["inner"] and member["visibility"] in ("public", "default"):
                yield f"{path}::{member['name']}", member, owner

    def is_called(self, path, item, owner):
        places = [item] if owner is None else [item, owner]
        parent = path.rpartition("::")[0]
        if owner is not None:
            parent = parent.rpartition("::")[0]
        places.append(self.index[self.by_path[parent]])
        call = calling(item, owner)
        return any(call.search(code) for place in places for code in examples(place["docs"] or ""))


def calling(item, owner):
    """Returns a pattern that matches a call of the item."""
    name = re.escape(item["name"])
    if "macro" in item["inner"]:
        return re.compile(rf"\b{name}!")
    arguments = r"(::<[^(]*>)?\("
    if owner is None:
        return re.compile(rf"(?<![.\w])(?<!fn ){name}{arguments}|::{name}\b")
    inputs = item["inner"]["function"]["sig"]["inputs"]
    forms = [rf"\b{re.escape(owner['name'])}(::<[^(]*>)?::{name}\b"]
    if inputs and inputs[0][0] == "self":
        forms.append(rf"\.{name}{arguments}")
    if "trait" in owner["inner"]:
        # A call on a type with the trait, or an implementation of the method.
        forms += [rf"[\w>]::{name}{arguments}", rf"\bfn {name}\b"]
    return re.compile("|".join(forms))


def examples(docs):
    """Yields the visible lines of each compiled example."""
    code = None
    for line in docs.splitlines():
        fence = FENCE.match(line)
        if fence and code is None:
            words = set(re.split(r"[,\s]+", fence[1].strip()))
            code, is_compiled = [], words <= COMPILED
        elif fence:
            if is_compiled:
                yield "\n".join(code)
            code = None
        elif code is not None and not re.match(r"\s*#(\s|$)", line):
            code.append(line)
