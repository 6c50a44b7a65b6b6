#!/usr/bin/env python3
"""A preprocessor of mdBook: links to pages of the guide stay in the book, and links out of `docs` are complete."""

import json
import re
import sys

REPOSITORY = "https://github.com/diesel-outbox/diesel-outbox/blob/main/"
INSIDE = re.compile(re.escape(REPOSITORY) + r"docs/([\w-]+\.md)")


def rewritten(item):
    if chapter := item.get("Chapter") if isinstance(item, dict) else None:
        text = INSIDE.sub(r"\1", chapter["content"])
        chapter["content"] = text.replace("](../", f"]({REPOSITORY}")
        for one in chapter["sub_items"]:
            rewritten(one)


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    _, book = json.load(sys.stdin)
    for item in book.get("items", book.get("sections")):
        rewritten(item)
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()
