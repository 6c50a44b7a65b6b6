#!/usr/bin/env python3
"""All measured numbers of the documents, from one run on one machine: `make bench-all`.

Runs scenarios of `diesel-outbox bench` one after the other and saves their reports in numbers.json after each scenario.
Needs DATABASE_URL and PG_BINDIR of a server that may be used up (scripts/with-postgres), and OUTBOX_URL of a fast
receiver (scripts/with-nginx).
"""

import datetime
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import textwrap
import time

import drawn

NUMBERS, CHART = drawn.HERE / "numbers.json", drawn.ROOT / "docs/images/performance.svg"
PAGE, README, BEYOND = (
    drawn.ROOT / name for name in ("docs/performance.md", "README.md", "docs/beyond-one-postgresql.md")
)
# A secret of nobody, for signed requests.
SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="


class Scenario:
    """A scenario of the program with its options. `small` replaces some options, to try this script."""

    def __init__(self, name, work, options, small, rounds=1):
        self.name, self.work, self.options, self.small = name, work, options, small
        # How often the program runs. Most scenarios have rounds of their own.
        self.rounds = rounds

    def options_of(self, is_small):
        return self.options | (self.small if is_small else {})

    def arguments(self, is_small):
        options = self.options_of(is_small).items()
        return [self.work, *itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in options)]

    def command(self, is_small):
        return " ".join(["diesel-outbox bench", *self.arguments(is_small)])


# Together 25 minutes on a slow machine. Neighbours with the same number of rounds take turns.
SCENARIOS = [
    Scenario("drain", "drain", {"messages": 300_000}, {"messages": 2_000}, 3),
    Scenario("drain-batched", "drain", {"messages": 300_000, "mode": "batched"}, {"messages": 2_000}, 3),
    Scenario(
        "drain-signed", "drain", {"messages": 300_000, "mode": "structured", "secret": SECRET}, {"messages": 2_000}, 3
    ),
    Scenario(
        "drain-beside-dead",
        "drain",
        {"messages": 100_000, "behind-dead": 1_000_000},
        {"messages": 2_000, "behind-dead": 5_000},
    ),
    Scenario("latency", "latency", {"rate": 100}, {"paced-seconds": 1}),
    Scenario("latency-1000", "latency", {"rate": 1_000}, {"paced-seconds": 1}),
    # One client may commit more slowly than this, and then takes longer.
    Scenario("latency-5000", "latency", {"rate": 5_000, "paced-seconds": 2}, {"paced-seconds": 1}),
    Scenario("latency-polling", "latency", {"listener": "false"}, {"paced-seconds": 1}),
    Scenario(
        "backlog", "backlog", {"waiting": "10000,1000000"}, {"waiting": "100,10000", "messages": 2_000, "rounds": 1}
    ),
    Scenario(
        "held-snapshot",
        "held-snapshot",
        {"settled": 300_000, "messages": 100_000},
        {"settled": 3_000, "messages": 2_000},
    ),
    Scenario("aged", "aged", {"past": 1_000_000, "rounds": 3}, {"past": 5_000, "messages": 2_000, "rounds": 1}),
    Scenario(
        "ordered",
        "ordered",
        {"messages": 40_000, "keys": "200,4000"},
        {"messages": 1_000, "keys": "20,100", "zipf-keys": 100, "hot-messages": 50},
    ),
    Scenario("relays", "relays", {"messages": 100_000}, {"messages": 2_000, "rounds": 1}),
    Scenario("producers", "producers", {}, {"seconds": 1, "clients": 4, "rounds": 1}),
    Scenario("failing", "failing", {}, {"messages": 1_000, "rounds": 1}),
    Scenario("page", "page", {"rounds": 1}, {"messages": 20_000, "waiting": 5_000, "dead": 1_000}),
    Scenario("enqueue", "enqueue", {}, {"messages": 2_000, "rounds": 1}),
    Scenario("feed", "feed", {"rounds": 5}, {"messages": 2_000, "rounds": 1, "paced-seconds": 1}),
    Scenario(
        "registered",
        "registered",
        {
            "destinations": 10_000,
            "rounds": 3,
            "paced": 2_000,
            "hanging": 200,
            "waiting": 1_000_000,
            "changes": 1_000,
            "rate": 1_000,
            "seconds": 15,
        },
        {
            "destinations": 50,
            "messages": 2_000,
            "rounds": 1,
            "backlogged": 10,
            "paced": 20,
            "hanging": 2,
            "waiting": 1_000,
            "changes": 100,
            "rate": 100,
            "seconds": 2,
        },
    ),
]


# --- Measuring -------------------------------------------------------------------------


def machine(program):
    postgres = subprocess.run(
        [pathlib.Path(os.environ["PG_BINDIR"]) / "postgres", "--version"], capture_output=True, text=True, check=True
    ).stdout
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return {"cores": os.cpu_count(), "postgresql": postgres.split()[2], "version": version.split()[-1]}


def run(program, scenario, is_small):
    """The report of one run, and its duration."""
    began = time.monotonic()
    ran = subprocess.run([program, "bench", *scenario.arguments(is_small), "--json"], stdout=subprocess.PIPE, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"bench-all: {scenario.command(is_small)}: exit code {ran.returncode}\n{ran.stdout}".rstrip())
    return json.loads(ran.stdout), time.monotonic() - began


def kept(numbers, here, is_small):
    """What stays of the numbers when some scenarios are measured again, until they are, and why nothing stays otherwise."""
    if numbers["machine"] != here or numbers["small"] != is_small:
        was = " ".join(f"{key}: {value}." for key, value in numbers["machine"].items())
        return {}, f"the other numbers are dropped, because they come from elsewhere ({was} small: {numbers['small']}.)"
    return numbers["scenarios"], None


def save(numbers):
    """In the order of the scenarios, by renaming: an interruption leaves a complete file."""
    order = {one.name: number for number, one in enumerate(SCENARIOS)}
    inner = dict(sorted(numbers["scenarios"].items(), key=lambda item: order.get(item[0], len(order))))
    new = NUMBERS.with_suffix(".new")
    new.write_text(json.dumps({**numbers, "scenarios": inner}, indent=1, ensure_ascii=False) + "\n")
    new.replace(NUMBERS)


def measure(program, only, is_small):
    here = machine(program)
    numbers = {"machine": here, "small": is_small, "scenarios": {}}
    if only and NUMBERS.exists():
        numbers["scenarios"], why = kept(json.loads(NUMBERS.read_text()), here, is_small)
        if why:
            print(f"bench-all: {why}", file=sys.stderr)
    wanted = [one for one in SCENARIOS if not only or one.name in only]
    began, done, all_runs = time.monotonic(), 0, sum(one.rounds for one in wanted)
    for rounds, turns in itertools.groupby(wanted, key=lambda one: one.rounds):
        turns = list(turns)
        results = {one.name: [] for one in turns}
        for _ in range(rounds):
            for one in turns:
                done += 1
                minutes = (time.monotonic() - began) / 60
                told = f"bench-all: {done} of {all_runs}, after {minutes:.1f} min: {one.command(is_small)}"
                print(told, file=sys.stderr, flush=True)
                results[one.name].append(run(program, one, is_small))
                if len(results[one.name]) == rounds:
                    reports, seconds = zip(*results[one.name])
                    numbers["scenarios"][one.name] = {
                        "date": datetime.date.today().isoformat(),
                        "command": one.command(is_small),
                        "seconds": round(sum(seconds), 1),
                        "reports": reports,
                    }
                    save(numbers)
    return json.loads(NUMBERS.read_text())


# --- Showing ---------------------------------------------------------------------------


def values(numbers, name, key):
    """The values of a measure, of each run of the program."""
    return [report[key] for report in numbers["scenarios"][name]["reports"]]


def median(numbers, name, key):
    return statistics.median(values(numbers, name, key))


def only_report(numbers, name):
    (report,) = numbers["scenarios"][name]["reports"]
    return report


def run_of(numbers, name, key, value):
    """The run of a scenario with this value."""
    return next(one for one in only_report(numbers, name)["runs"] if one[key] == value)


def commands(numbers, *names):
    return "\n".join(["```sh", *(numbers["scenarios"][name]["command"] for name in names), "```"])


# The columns of scenarios with a row for each run: title, key, and decimals. None: a word.
RATE, CPU = ("messages/s", "messages_per_second", 0), ("CPU per message, µs", "own_cpu_us_per_message", 1)
CLAIM = ("mean claim, ms", "claim_ms", 1)
RUNS = {
    "backlog": [
        ("waiting messages", "waiting", 0),
        RATE,
        ("rate ratio", "rate_ratio_to_smallest", 2),
        CLAIM,
        ("claim ratio", "claim_ratio_to_smallest", 2),
        CPU,
    ],
    "held-snapshot": [
        ("open transaction of", "holder", None),
        RATE,
        ("ratio", "ratio_without_holder", 2),
        ("messages/s after a restart", "messages_per_second_after_start", 0),
        ("ratio", "ratio_without_holder_after_start", 2),
        CLAIM,
        CPU,
    ],
    "aged": [
        ("outbox", "outbox", None),
        RATE,
        ("rate ratio", "rate_ratio", 2),
        ("WAL per message, bytes", "wal_bytes_per_message", 0),
        ("WAL ratio", "wal_ratio", 2),
        CLAIM,
        CPU,
    ],
    "ordered": [
        ("distribution", "shape", None),
        ("keys", "keys", 0),
        ("messages", "messages", 0),
        RATE,
        ("without keys", "unordered_messages_per_second", 0),
        ("ratio", "ratio_to_unordered", 2),
        ("misorders", "misorders", 0),
        ("overlaps", "overlaps", 0),
    ],
    "relays": [
        ("processes", "processes", 0),
        RATE,
        ("ratio", "ratio_to_fewest", 2),
        ("conflicts", "conflicts", 0),
        CPU,
    ],
    "producers": [
        ("situation", "situation", None),
        ("commits/s", "commits_per_second", 0),
        ("compared with", "compared_with", None),
        ("ratio", "ratio", 2),
    ],
    "failing": [
        ("the working destination", "what", None),
        RATE,
        ("ratio", "ratio", 2),
        ("failed attempts", "failed_attempts", 0),
    ],
    "page": [("loaded pages", "pages", None), RATE, ("ratio", "ratio_to_without", 2), CPU],
    "enqueue": [("function", "by", None), RATE, ("WAL per message, bytes", "wal_bytes_per_message", 0)],
    "feed": [
        ("delivered", "run", None),
        RATE,
        ("ratio to HTTP", "ratio_to_http", 2),
        CPU,
        ("WAL per message, bytes", "wal_bytes_per_message", 0),
    ],
}


def runs(numbers, name):
    cell = lambda value, digits: value.replace("_", " ") if digits is None else drawn.number(value, digits)
    rows = [[cell(one[key], digits) for _, key, digits in RUNS[name]] for one in only_report(numbers, name)["runs"]]
    return commands(numbers, name) + "\n\n" + drawn.table([title for title, _, _ in RUNS[name]], rows)


def origin(numbers):
    here, scenarios = numbers["machine"], numbers["scenarios"]
    dates = sorted({one["date"] for one in scenarios.values()})
    minutes = sum(one["seconds"] for one in scenarios.values()) / 60
    trial = "**A trial with small sizes: these are not measurements.** " if numbers["small"] else ""
    return wrapped(
        f"{trial}diesel-outbox {here['version']} on {here['cores']} cores shared by PostgreSQL {here['postgresql']}, the"
        " relay and nginx; fsync, synchronous commit and the ledger are on."
        f" Measured on {' and '.join(dates)}, in {minutes:.0f} minutes."
    )


def wrapped(text):
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def drain(numbers):
    names = {
        "drain": "one POST per message",
        "drain-batched": "50 messages per request (`--mode batched`)",
        "drain-signed": "signed requests (`--mode structured --secret …`)",
    }
    columns = [
        RATE,
        CPU,
        ("WAL per message, bytes", "wal_bytes_per_message", 0),
        ("p99 claim, ms", "claim_p99_ms", 1),
        ("peak memory, MiB", "peak_memory_mib", 1),
    ]
    rows = [
        [title, *(drawn.shown(values(numbers, name, key), digits) for _, key, digits in columns)]
        for name, title in names.items()
    ]
    return commands(numbers, *names) + "\n\n" + drawn.table(["", *(title for title, _, _ in columns)], rows)


def beside_dead(numbers):
    report = only_report(numbers, "drain-beside-dead")
    beside = report["beside_dead"]
    rows = [
        ["none", drawn.number(report["messages_per_second"], 0), "", drawn.number(report["claim_ms"], 1)],
        [
            drawn.number(beside["waiting"], 0),
            drawn.number(beside["messages_per_second"], 0),
            drawn.number(beside["share_of_rate_alone"], 2),
            drawn.number(beside["claim_ms"], 1),
        ],
    ]
    titles = ["messages for the dead destination", "messages/s", "ratio", "mean claim, ms"]
    return commands(numbers, "drain-beside-dead") + "\n\n" + drawn.table(titles, rows)


LOADS = ["latency", "latency-1000", "latency-5000"]
QUANTILES = [("p50", "p50_ms"), ("p90", "p90_ms"), ("p99", "p99_ms"), ("max", "max_ms")]


def latency(numbers):
    rows = []
    for name in [*LOADS, "latency-polling"]:
        report = only_report(numbers, name)
        rows.append([
            "polling only" if name == "latency-polling" else "notified",
            drawn.number(report["per_second"], 0),
            drawn.number(report["committed_per_second"], 0),
            *(drawn.number(report[key], 1) for _, key in QUANTILES),
        ])
    titles = ["relay", "target commits/s", "commits/s", *(f"{title}, ms" for title, _ in QUANTILES)]
    return commands(numbers, *LOADS, "latency-polling") + "\n\n" + drawn.table(titles, rows)


def page(numbers):
    report = only_report(numbers, "page")
    pages = report["pages"]
    loads, slowest = sum(one["loads"] for one in pages), max(pages, key=lambda one: one["max_ms"])
    return runs(numbers, "page") + (
        f"\n\n{report['waiting']:,} messages wait, and there are {report['dead']:,} dead letters."
        f" The slowest of {loads:,} loads took {slowest['max_ms']:,.0f} ms (`{slowest['page']}`)."
    )


def feed(numbers):
    report = only_report(numbers, "feed")
    read = " and ".join(
        f"{drawn.number(one['events_per_second'], 0)} events a second by {one['readers']}"
        for one in report["reading"]["rates"]
    )
    quantiles = lambda one: f"p50 {one['p50_ms']:,.1f} ms and p99 {one['p99_ms']:,.1f} ms"
    polled, sent = quantiles(report["reading"]["latency"]), quantiles(report["webhook_latency"])
    return runs(numbers, "feed") + "\n\n" + wrapped(
        f"Readers get {read}. From a commit to a reader that waits it takes {polled}; to a webhook's response, {sent}."
    )


def registered(numbers):
    report = only_report(numbers, "registered")
    (scenario,) = (one for one in SCENARIOS if one.name == "registered")
    options = scenario.options_of(numbers["small"])
    of = lambda what: run_of(numbers, "registered", "what", what)
    p99 = lambda what: f"{drawn.number(of(what)['p99_ratio'], 1)} times ({drawn.number(of(what)['p99_ms'], 0)} ms)"
    rows = [
        [
            f"rate of {report['destinations']:,} destinations, against one configured",
            drawn.number(of("registered")["ratio"], 2),
        ],
        ["Jain's fairness index of destinations with a backlog", drawn.number(report["fairness"], 2)],
        ["memory of the process", f"{report['peak_memory_mib']:,.0f} MiB"],
        ["threads of the process", drawn.number(report["threads"], 0)],
        [f"p99 of {options['rate']:,} messages per second to {options['paced']:,} destinations", f"{drawn.number(of('paced')['p99_ms'], 0)} ms"],
        [f"p99 while {options['hanging']:,} of {options['paced']:,} destinations hang", p99("paced_beside_hanging")],
        [f"p99 beside a destination with {options['waiting']:,} waiting messages", p99("paced_beside_waiting")],
        [f"p99 beside {options['changes']:,} changed rows a second, at two relays", p99("paced_beside_changes")],
    ]
    return commands(numbers, "registered") + "\n\n" + drawn.table(["", ""], rows)


def summary(numbers):
    def rate(name):
        cpu = drawn.number(median(numbers, name, "own_cpu_us_per_message"), 1)
        return f"{drawn.shown(values(numbers, name, 'messages_per_second'), 0)} messages/s, {cpu} µs of CPU per message"

    idle, backlog = only_report(numbers, "latency"), only_report(numbers, "backlog")["runs"]
    fewest, most = (choose(backlog, key=lambda one: one["waiting"]) for choose in (min, max))
    rows = [
        ["delivered, one POST per message", rate("drain")],
        ["delivered, 50 messages per request (`--mode batched`)", rate("drain-batched")],
        ["from commit to response, on an idle outbox", f"p50 {idle['p50_ms']:.1f} ms, p99 {idle['p99_ms']:.1f} ms"],
        [
            f"with {most['waiting']:,} messages waiting",
            f"{most['rate_ratio_to_smallest']:.2f} of the rate with {fewest['waiting']:,} waiting",
        ],
        ["memory of the process", f"{max(values(numbers, 'drain', 'peak_memory_mib')):.0f} MiB"],
    ]
    heading = wrapped(f"{origin(numbers)} Medians, with ranges in parentheses.")
    return heading + "\n\n" + drawn.table(["", ""], rows)


def panels(numbers):
    """The bars: title, and rows."""
    aged, held = only_report(numbers, "aged"), only_report(numbers, "held-snapshot")
    of_aged = {"fresh": "new tables", "aged": f"after {aged['past']:,} deliveries"}
    of_held = {
        "nobody": "no open transaction",
        "old_reader": "an old reader",
        "idle_writer": "an idle writer",
    }
    rows = lambda report, key, names: [
        (names[one[key]], one["messages_per_second"], number > 0) for number, one in enumerate(report["runs"])
    ]
    return [
        ("Messages per second, by the age of the tables", rows(aged, "outbox", of_aged)),
        (
            f"Messages per second after {held['settled']:,} settled messages, by open transaction",
            rows(held, "holder", of_held),
        ),
    ]


def load(numbers):
    """The curves: title, steps, and series."""
    reports = [only_report(numbers, name) for name in LOADS]
    steps = [f"{report['committed_per_second']:,.0f} commits/s" for report in reports]
    of = lambda key: [report[key] for report in reports]
    series = [("p50", of("p50_ms"), True), ("p99", of("p99_ms"), False)]
    return "From commit to response, ms", steps, series


def words(numbers):
    """The chart for those who do not see it."""
    parts = [
        f"{title}: " + ", ".join(f"{label} {value:,.0f}" for label, value, _ in rows) for title, rows in panels(numbers)
    ]
    title, steps, series = load(numbers)
    parts.append(f"{title}: " + ", ".join(
        f"at {step} " + " and ".join(f"{label} {at[number]:,.1f}" for label, at, _ in series)
        for number, step in enumerate(steps)
    ))
    return "; ".join(parts)


def chart(numbers):
    parts, y = [], 0
    for title, rows in panels(numbers):
        more, y = drawn.bars(title, rows, y)
        parts += more
    more, y = drawn.curves(*load(numbers), y)
    return drawn.svg(parts + more, y, words(numbers), drawn.STYLE + drawn.CURVES_STYLE)


def ceilings(numbers):
    """What one database does."""
    per_second = lambda name: median(numbers, name, "messages_per_second")
    of_keys = lambda shape: run_of(numbers, "ordered", "shape", shape)["messages_per_second"]
    commits = run_of(numbers, "producers", "situation", "relay_busy")["commits_per_second"]
    of_enqueue = lambda by: run_of(numbers, "enqueue", "by", by)["messages_per_second"]
    rates = [
        ("commits of one message each, by many clients, while a relay delivers", commits),
        ("messages inserted by one client, many in a statement", of_enqueue("enqueue_bulk")),
        ("messages delivered, one POST each", per_second("drain")),
        ("messages delivered, 50 in a POST", per_second("drain-batched")),
        ("messages delivered, Zipf keys", of_keys("zipf")),
        ("messages delivered, one key", of_keys("hot")),
    ]
    rows = [[what, drawn.number(rate, 0), f"{rate * 86_400 / 1e6:,.0f} million"] for what, rate in rates]
    wal = drawn.number(median(numbers, "drain", "wal_bytes_per_message"), 0)
    memory = max(values(numbers, "drain", "peak_memory_mib"))
    return (
        drawn.table(["", "a second", "a day"], rows)
        + "\n\n"
        + wrapped(f"Delivering a message writes {wal} bytes of WAL. The relay needs {memory:.0f} MiB.")
    )


BLOCKS = {
    PAGE: {
        "machine": origin,
        "chart": lambda numbers: f"![{words(numbers)}]({drawn.IMAGES}{CHART.name})",
        "drain": drain,
        "beside-dead": beside_dead,
        "latency": latency,
        **{name: (lambda numbers, name=name: runs(numbers, name)) for name in RUNS if name not in ("page", "feed")},
        "page": page,
        "feed": feed,
        "registered": registered,
    },
    README: {"summary": summary},
    BEYOND: {"ceilings": ceilings},
}


def documents(numbers):
    """What the documents show of the numbers: by their files."""
    missing = [one.name for one in SCENARIOS if one.name not in numbers["scenarios"]]
    if missing:
        raise SystemExit(f"bench-all: {NUMBERS.name} lacks scenarios: measure --only {' '.join(missing)}")
    shown = {CHART: chart(numbers)}
    for file, blocks in BLOCKS.items():
        text = file.read_text()
        for name, body in blocks.items():
            text = drawn.put(text, f"make bench-all: {name}", body(numbers))
        shown[file] = text
    return shown


# --- Checking --------------------------------------------------------------------------

# Rates and costs, which no run of this script would renew if they stood in prose.
MEASURED = re.compile(r"\d[\d.,]*\s(?:(?:messages|commits)(?:/s| a second| per second)|µs)(?!\w)")
# In the page about measurements also times, memory and ratios.
MEASURED_ON_PAGE = re.compile(MEASURED.pattern + r"|\d[\d.,]*\s(?:ms|MiB)\b|\b\d\.\d+\b")
GENERATED = re.compile(r"<!-- (make [\w-]+)(?:: [\w-]+)? -->.*?<!-- end of \1 -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def measured(text, pattern=MEASURED):
    """Measured numbers in prose."""
    return pattern.findall(CODE.sub("", GENERATED.sub("", text)))


def prose():
    return [README, drawn.ROOT / "ARCHITECTURE.md", *sorted((drawn.ROOT / "docs").glob("*.md"))]


def check(numbers):
    """What is wrong."""
    wrong = [
        f"{file.name} does not show what {NUMBERS.name} has: run benchmarks/all.py --draw"
        for file in drawn.stale(documents(numbers))
    ]
    for one in SCENARIOS:
        if (command := numbers["scenarios"][one.name]["command"]) != one.command(numbers["small"]):
            wrong.append(f"{one.name} was measured by another command: {command}")
    for file in prose():
        for found in measured(file.read_text(), MEASURED_ON_PAGE if file == PAGE else MEASURED):
            wrong.append(f"{file.name} has a measured number outside of generated tables: {found!r}")
    return wrong


def main():
    parser = drawn.arguments(__doc__)
    names = [one.name for one in SCENARIOS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"measure only: {', '.join(names)}")
    parser.add_argument("--small", action="store_true", help="small sizes: tries this script, and measures nothing")
    options = parser.parse_args()
    if options.check:
        wrong = check(json.loads(NUMBERS.read_text()))
        raise SystemExit("\n".join(f"bench-all: {one}" for one in wrong) if wrong else 0)
    if options.draw:
        return drawn.write(documents(json.loads(NUMBERS.read_text())))
    numbers = measure(options.ours, options.only or [], options.small)
    if options.write:
        return drawn.write(documents(numbers))
    print(f"bench-all: {NUMBERS.name} is written; benchmarks/all.py --draw updates the documents", file=sys.stderr)


if __name__ == "__main__":
    main()
