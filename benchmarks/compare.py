#!/usr/bin/env python3
"""The same work by diesel-outbox and by others, side by side in one run: `make compare`.

Each round, each shape of work, each of them: a new database, so many messages in it, then a worker that posts them to
nginx, until all are acknowledged, or for half a minute. Time counts from the first request. Needs DATABASE_URL of a server that may be used up, OUTBOX_URL
of an nginx that counts its requests at /requests, and the programs (see `make compare`).
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

import drawn

HERE = drawn.HERE
NODE = HERE / "peers/node"
DATABASE = "compare"
PAYLOAD_BYTES = 250
PATIENCE = 600
KEYS = 1_000


class Shape:
    """A kind of work: who takes part, and with how many messages."""

    def __init__(self, title, share=1, key=None, seconds=None, variables={}, is_pinned=False):
        # The share of the messages of the first shape, and how long a worker may take before it is stopped.
        self.title, self.share, self.seconds = title, share, seconds
        # An SQL expression for the ordering key of message n.
        self.key = key
        # The settings of diesel-outbox.
        self.variables, self.is_pinned = variables, is_pinned


# The numbers of messages fall with the speed. u runs evenly through 0 to 1, so the keys are Zipf's: of 1,000 keys, the
# first has a tenth of the messages.
SHAPES = {
    "each": Shape("one POST for each message"),
    "pinned": Shape("beside an open transaction that has written", is_pinned=True),
    "batched": Shape("50 messages in a POST", 4, variables={"OUTBOX_MODE": "batched"}),
    "zipf": Shape("1,000 keys in order, with Zipf's distribution", 0.4, f"floor({KEYS} ^ (n * 0.618033988749895 % 1))", 30),
    "one-key": Shape("one key in order", 0.1, "1", 30),
}
TICKS = os.sysconf("SC_CLK_TCK")


class Peer:
    """One of those that are compared."""

    def __init__(self, name, version, prepare, work, left, crash, shapes):
        self.name, self.version, self.prepare, self.work, self.left = name, version, prepare, work, left
        # The work that it can do.
        self.shapes = {"each", "pinned", *shapes}
        # What an acknowledgement means when a process dies.
        self.crash = crash


def locked(package):
    packages = json.loads((NODE / "package-lock.json").read_text())["packages"]
    return packages[f"node_modules/{package}"]["version"]


def of_cargo(package):
    text = (HERE / "peers/rust/Cargo.lock").read_text()
    return re.search(rf'name = "{package}"\nversion = "([^"]+)"', text).group(1)


def peers(programs, ours):
    node = str(NODE / "node_modules/.bin/node")
    enqueue = (
        "INSERT INTO outbox (topic, ordering_key, payload)"
        " SELECT 'bench', ({key})::text, json_build_object('text', repeat('x', {bytes}))"
        " FROM generate_series(1, {count}) AS n"
    )
    opp = (
        "INSERT INTO outbox (idempotent_key, partition_key, destinations, payload)"
        " SELECT gen_random_uuid(), coalesce(md5(({key})::text)::uuid, gen_random_uuid()),"
        " json_build_array(json_build_object('url', '{url}')), repeat('x', {bytes})"
        " FROM generate_series(1, {count}) AS n"
    )
    return [
        Peer(
            "diesel-outbox",
            subprocess.run([ours, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1],
            [[ours, "migrate"], enqueue],
            [ours, "run"],
            "SELECT EXISTS (SELECT FROM outbox)",
            "each message separately, many in one statement, fenced by a lease; one ledger row for each",
            SHAPES,
        ),
        Peer(
            "pg-boss",
            locked("pg-boss"),
            [[node, str(NODE / "pg-boss.mjs"), "prepare", "{count}", "{bytes}"]],
            [node, str(NODE / "pg-boss.mjs"), "work"],
            "SELECT EXISTS (SELECT FROM pgboss.job WHERE name = 'bench' AND state < 'completed')",
            "a batch of 1,000 as a whole; after a crash, up to 2,000 are sent again, 15 min later",
            {"batched", "zipf", "one-key"},
        ),
        Peer(
            "graphile-worker",
            locked("graphile-worker"),
            [[node, str(NODE / "graphile-worker.mjs"), "prepare", "{count}", "{bytes}"]],
            [node, str(NODE / "graphile-worker.mjs"), "work"],
            "SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
            "jobs deleted in batches; after a crash, up to 500 jobs stay locked for 4 hours",
            {"zipf", "one-key"},
        ),
        Peer(
            "awa",
            of_cargo("awa"),
            [[str(programs / "awa"), "prepare", "{count}", "{bytes}"]],
            [str(programs / "awa"), "work"],
            "SELECT EXISTS (SELECT FROM awa.jobs WHERE state NOT IN ('completed', 'failed', 'cancelled'))",
            "each job separately, many in one statement; a heartbeat rescues the jobs of a dead worker",
            {},
        ),
        Peer(
            "outbox-pattern-processor",
            of_cargo("outbox-pattern-processor"),
            [(HERE / "peers/outbox-pattern-processor.sql").read_text(), opp],
            [str(programs / "outbox-pattern-processor")],
            "SELECT EXISTS (SELECT FROM outbox)",
            "all messages of a query as a whole; after a crash, up to 1,000 are sent again, 30 s later",
            {"zipf", "one-key"},
        ),
    ]


class Server:
    """PostgreSQL: what it is asked, and what it costs."""

    def __init__(self, url):
        self.url = url
        base, _, query = url.partition("?")
        self.of_database = base.rsplit("/", 1)[0] + "/" + DATABASE + (f"?{query}" if query else "")

    def ask(self, sql, url=None):
        command = ["psql", "-X", "-q", "-At", "-v", "ON_ERROR_STOP=1", url or self.of_database, "-c", sql]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode != 0:
            raise SystemExit(f"compare: {answer.stderr.strip()}: {sql[:200]}")
        return answer.stdout.strip()

    def fresh(self):
        self.ask(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)", self.url)
        self.ask(f"CREATE DATABASE {DATABASE}", self.url)

    @contextlib.contextmanager
    def pinned(self, is_so):
        """Beside a transaction that has written and stays open: nothing that was deleted since can be removed."""
        if not is_so:
            yield
            return
        command = ["psql", "-X", "-q", "-At", "-v", "ON_ERROR_STOP=1", self.of_database]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as session:
            session.stdin.write("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current();\n")
            session.stdin.flush()
            if not session.stdout.readline().strip():
                raise SystemExit("compare: the open transaction could not begin")
            try:
                yield
            finally:
                session.kill()

    def cpu_seconds(self):
        """Of all its processes, also those that have ended."""
        folder = self.ask("SHOW data_directory", self.url)
        main = int((pathlib.Path(folder) / "postmaster.pid").read_text().split()[0])
        ticks = sum(int(field) for field in stat(main)[11:15])
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := stat(int(entry.name))) and int(fields[1]) == main:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS


def stat(process):
    """The fields of /proc/…/stat behind the name, which may hold anything. None: it is gone."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rsplit(")", 1)[1].split()


def requests(url):
    with urllib.request.urlopen(url + "requests") as answer:
        numbers = answer.read().decode().splitlines()[2].split()
    return int(numbers[2])


def measure(peer, name, server, receiver, messages):
    shape = SHAPES[name]
    count = int(messages * shape.share)
    environment = {
        **os.environ,
        "DATABASE_URL": server.of_database,
        "OUTBOX_URL": receiver,
        "RECEIVER_URL": receiver,
        "COMPARE_SHAPE": name,
        "RUST_LOG": "error",
        **shape.variables,
    }
    given = {"count": count, "bytes": PAYLOAD_BYTES, "url": receiver, "key": shape.key or "NULL"}
    server.fresh()
    for step in peer.prepare:
        if isinstance(step, str):
            server.ask(step.format(**given) if "{" in step else step)
        else:
            subprocess.run([part.format(**given) for part in step], env=environment, check=True, stdout=subprocess.DEVNULL)
    server.ask("VACUUM ANALYZE")
    server.ask("CHECKPOINT")
    before, wal = requests(receiver), server.ask("SELECT pg_current_wal_lsn()")
    cpu_before = server.cpu_seconds()
    with open(f"/tmp/compare-{peer.name}.log", "w") as log, server.pinned(shape.is_pinned):
        worker = subprocess.Popen(peer.work, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            until, began, is_done = time.monotonic() + PATIENCE, None, False
            while not is_done:
                # One of these requests is this one.
                before += 1
                seen, now = requests(receiver), time.monotonic()
                sent = seen - before
                if began is None and sent > 0:
                    began = now
                check(worker, peer, now < until, f"{sent} requests for {count} messages are sent, and not all acknowledged")
                # A request may have many messages.
                may_be_done = sent >= count or (name == "batched" and sent > 0)
                is_done = may_be_done and server.ask(peer.left) != "t"
                if shape.seconds and began and now - began > shape.seconds:
                    is_done, count = True, min(count, sent)
                if not is_done:
                    time.sleep(0.005 if began is None or may_be_done else 0.02)
            took = time.monotonic() - began
            own = sum(int(field) for field in stat(worker.pid)[11:15]) / TICKS
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    wal_bytes = float(server.ask(f"SELECT pg_current_wal_lsn() - '{wal}'"))
    sent = requests(receiver) - before - 1
    return {
        "messages_per_second": count / took,
        "own_cpu_us": own / count * 1e6,
        "server_cpu_us": (server.cpu_seconds() - cpu_before) / count * 1e6,
        "wal_bytes": wal_bytes / count,
        "requests": sent / count,
    }


def check(worker, peer, is_in_time, standing):
    if worker.poll() is not None:
        raise SystemExit(f"compare: {peer.name} has ended by itself: see /tmp/compare-{peer.name}.log")
    if not is_in_time:
        raise SystemExit(f"compare: {peer.name} takes longer than {PATIENCE} s: {standing}")


MEASURES = [
    ("messages_per_second", "messages/s", 0),
    ("own_cpu_us", "CPU per message, µs", 1),
    ("server_cpu_us", "server CPU per message, µs", 1),
    ("wal_bytes", "WAL per message, bytes", 0),
    ("requests", "requests per message", 2),
]


def table(report):
    """In Markdown, the fastest first."""
    titles = ["", *(title for _, title, _ in MEASURES), "what an acknowledgement covers"]
    return drawn.table(titles, [
        [
            f"{one['name']} {one['version']}",
            *(drawn.shown(one["shapes"]["each"][name], digits) for name, _, digits in MEASURES),
            one["crash"],
        ]
        for one in sorted(report["peers"], key=lambda one: -rate(one, "each"))
    ])


def rate(peer, shape):
    return statistics.median(peer["shapes"][shape]["messages_per_second"])


def table_of_shapes(report):
    """The rates of each shape, in Markdown: a row for each of them, and its share of its own rate in the first shape."""
    def cell(one, shape):
        if shape not in one["shapes"]:
            return "–"
        shown = drawn.shown(one["shapes"][shape]["messages_per_second"], 0)
        return shown if shape == "each" else f"{shown}, {rate(one, shape) / rate(one, 'each'):.2f}"

    return drawn.table(["messages/s, and the ratio to the first column", *(shape.title for shape in SHAPES.values())], [
        [one["name"], *(cell(one, shape) for shape in SHAPES)]
        for one in sorted(report["peers"], key=lambda one: -rate(one, "each"))
    ])


CHARTS = [("messages_per_second", "Messages delivered per second"), ("own_cpu_us", "CPU per message, µs")]


def chart(report):
    """An SVG of rates and costs."""
    parts, y = [], 0
    for name, title in CHARTS:
        medians = [(statistics.median(one["shapes"]["each"][name]), one["name"]) for one in report["peers"]]
        medians.sort(reverse=name == "messages_per_second")
        more, y = drawn.bars(title, [(label, value, label == "diesel-outbox") for value, label in medians], y)
        parts += more
    words = "; ".join(f"{title}: " + ", ".join(
        f"{one['name']} {statistics.median(one['shapes']['each'][name]):,.0f}" for one in report["peers"]
    ) for name, title in CHARTS)
    return drawn.svg(parts, y, words)


NUMBERS, CHART = HERE / "compare.json", drawn.ROOT / "docs/images/compare.svg"
PAGE = drawn.ROOT / "docs/performance.md"


def documents(report):
    """What the documents show of the numbers: by their files."""
    said = (
        f"{report['messages']:,} messages of {report['payload_bytes']} bytes, {report['rounds']} rounds, PostgreSQL"
        f" {report['postgresql'].split()[0]}, {report['cores']} cores. Medians, with ranges in parentheses.\n\n"
    )
    tables = f"{said}{table(report)}\n\n{table_of_shapes(report)}"
    return {PAGE: drawn.put(PAGE.read_text(), "make compare", tables), CHART: chart(report)}


def write(report):
    NUMBERS.write_text(json.dumps(report, indent=1) + "\n")
    drawn.write(documents(report))


def main():
    parser = drawn.arguments(__doc__)
    parser.add_argument("--peers", type=pathlib.Path, help="the folder with the Rust peers")
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of those to measure")
    options = parser.parse_args()
    if options.check:
        for file in drawn.stale(documents(json.loads(NUMBERS.read_text()))):
            raise SystemExit(f"compare: {file.name} does not show what {NUMBERS.name} has: run compare.py --draw")
        return
    if options.draw:
        return write(json.loads(NUMBERS.read_text()))
    server, receiver = Server(os.environ["DATABASE_URL"]), os.environ["OUTBOX_URL"]
    all_of_them = [one for one in peers(options.peers, options.ours) if not options.only or one.name in options.only]
    measured = {one.name: {} for one in all_of_them}
    for number in range(1, options.rounds + 1):
        for shape in SHAPES:
            for peer in (one for one in all_of_them if shape in one.shapes):
                print(f"round {number} of {options.rounds}, {shape}: {peer.name} {peer.version}", file=sys.stderr, flush=True)
                run = measure(peer, shape, server, receiver, options.messages)
                measured[peer.name].setdefault(shape, []).append(run)
    report = {
        "messages": options.messages,
        "rounds": options.rounds,
        "payload_bytes": PAYLOAD_BYTES,
        "cores": os.cpu_count(),
        "postgresql": server.ask("SHOW server_version", server.url),
        "peers": [
            {
                "name": one.name,
                "version": one.version,
                "crash": one.crash,
                "shapes": {
                    shape: {name: [run[name] for run in runs] for name, *_ in MEASURES}
                    for shape, runs in measured[one.name].items()
                },
            }
            for one in all_of_them
        ],
    }
    print(table(report), table_of_shapes(report), sep="\n\n")
    if options.write:
        write(report)


if __name__ == "__main__":
    main()
