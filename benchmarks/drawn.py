"""Measured numbers in documents and charts: what compare.py and all.py share."""

import argparse
import pathlib
import statistics

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
# Documentation on docs.rs has no images of its own.
IMAGES = "https://raw.githubusercontent.com/diesel-outbox/diesel-outbox/main/docs/images/"


def arguments(description):
    """A parser with the arguments that both commands have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", default="diesel-outbox", help="the executable of diesel-outbox")
    parser.add_argument("--write", action="store_true", help="write the tables and the chart into the repository")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the numbers again")
    parser.add_argument("--check", action="store_true", help="measure nothing: do the documents show the numbers?")
    return parser


def begin_of(name):
    return f"<!-- {name} -->\n"


def end_of(name):
    """`make bench-all: latency` ends like all blocks of `make bench-all`."""
    return f"<!-- end of {name.split(':')[0]} -->"


def put(text, name, body):
    """The text with this body between the markers of this name."""
    head, begin, rest = text.partition(begin_of(name))
    _, end, tail = rest.partition(end_of(name))
    if not begin or not end:
        raise SystemExit(f"a document lacks the markers of a generated block: {name}")
    return f"{head}{begin}\n{body}\n\n{end}{tail}"


def stale(documents):
    """The files that do not have the text that they should have."""
    return [file for file, text in documents.items() if not file.is_file() or file.read_text() != text]


def write(documents):
    for file, text in documents.items():
        file.write_text(text)


def number(value, digits):
    """A value of a report, or `-` if there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def shown(values, digits):
    """The median, and the range where there is a range."""
    if any(value is None for value in values):
        return "-"
    median = number(statistics.median(values), digits)
    low, high = number(min(values), digits), number(max(values), digits)
    return median if low == high else f"{median} ({low}–{high})"


def table(titles, rows):
    """In Markdown."""
    line = lambda cells: "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
    return "\n".join([line(titles), "|---" * len(titles) + "|", *map(line, rows)])


# Light or dark as the reader's page is.
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600}.bar{fill:#8c959f}.ours{fill:#0969da}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bar{fill:#6e7681}.ours{fill:#4493f8}}"
)
CURVES_STYLE = (
    ".curve{fill:none;stroke:#8c959f;stroke-width:2}.curve.ours{stroke:#0969da;fill:none}.middle{text-anchor:middle}"
    "@media(prefers-color-scheme:dark){.curve{stroke:#6e7681}.curve.ours{stroke:#4493f8}}"
)
NAMES, WIDTH, ROW = 220, 720, 26
# Of curves: the height between the least and the greatest value.
HEIGHT = 110


def bars(title, rows, y, digits=0):
    """One bar below the other. A row has a label, a value, and whether it is highlighted. Returns parts and the new
    y."""
    y += 24
    parts = [f'<text class="title" x="0" y="{y}">{title}</text>']
    most = max(value for _, value, _ in rows)
    for label, value, is_highlighted in rows:
        y += ROW
        length = round(value / most * (WIDTH - NAMES - 80))
        kind = "bar ours" if is_highlighted else "bar"
        parts.append(f'<text x="0" y="{y}">{label}</text>')
        parts.append(f'<rect class="{kind}" x="{NAMES}" y="{y - 13}" width="{max(length, 1)}" height="16"/>')
        parts.append(f'<text x="{NAMES + length + 8}" y="{y}">{number(value, digits)}</text>')
    return parts, y + 16


def curves(title, steps, series, y, digits=1):
    """Curves over the same steps, which are equally far apart. A curve has a label, values, and whether it is
    highlighted. The axis begins at zero. Returns parts and the new y."""
    y += 24
    parts = [f'<text class="title" x="0" y="{y}">{title}</text>']
    most = max(max(values) for _, values, _ in series)
    bottom = y + 34 + HEIGHT
    across = [NAMES + round((WIDTH - NAMES - 100) * index / max(len(steps) - 1, 1)) + 20 for index in range(len(steps))]
    for position, (label, values, is_highlighted) in enumerate(series):
        points = [(x, round(bottom - value / most * HEIGHT)) for x, value in zip(across, values)]
        kind = " ours" if is_highlighted else ""
        parts.append(f'<polyline class="curve{kind}" points="{" ".join(f"{x},{top}" for x, top in points)}"/>')
        # The lowest curve has its values below its points.
        shift = 17 if position == 0 else -8
        for (x, top), value in zip(points, values):
            parts.append(f'<circle class="bar{kind}" cx="{x}" cy="{top}" r="4"/>')
            parts.append(f'<text class="middle" x="{x}" y="{top + shift}">{number(value, digits)}</text>')
        parts.append(f'<rect class="bar{kind}" x="0" y="{y + 27 + ROW * position}" width="16" height="4"/>')
        parts.append(f'<text x="24" y="{y + 34 + ROW * position}">{label}</text>')
    y = bottom + 38
    for x, step in zip(across, steps):
        parts.append(f'<text class="middle" x="{x}" y="{y}">{step}</text>')
    return parts, y + 16


def svg(parts, height, words, style=STYLE):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    return "\n".join([head, f"<title>{words}</title>", f"<style>{style}</style>", *parts, "</svg>"]) + "\n"
