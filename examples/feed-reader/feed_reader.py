"""Reads a feed of diesel-outbox with Python's standard library alone, and does the work of each message once.

The position is kept in SQLite, in the transaction of the work: both are stored, or neither, whenever this program is killed.
So are the ids: a message comes again if somebody sends it again, and after a 409, when the program continues from a time.

    python3 feed_reader.py https://shop.example/api/v1/feeds/crm/events TOKEN_FILE crm.db
"""

import http.client
import itertools
import json
import random
import sqlite3
import sys
import time
import urllib.error
import urllib.request

WAIT, MARGIN, MOST_BYTES = 20, 30, 64 * 1024 * 1024


def work(db, event):
    """What an event is for. What is written through `db` is written exactly once."""
    db.execute("INSERT INTO orders (id, event) VALUES (?, ?)", [event["id"], json.dumps(event)])


class NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None  # The token is for this server only.


def page(url, token, after):
    """The events behind the cursor and the next cursor. Retries what a retry can help; else the program ends."""
    request = urllib.request.Request(f"{url}?after={after}&wait={WAIT}s", headers={"Authorization": f"Bearer {token}"})
    for tries in itertools.count():
        delay = min(30, 0.5 * 2 ** min(tries, 6))
        try:
            with urllib.request.build_opener(NoRedirects).open(request, timeout=WAIT + MARGIN) as answer:
                return json.loads(answer.read(MOST_BYTES)), answer.headers["outbox-feed-next"]
        except urllib.error.HTTPError as error:
            if error.code != 429 and error.code < 500:  # 409 and 410 say which cursor to write into feed_position.
                raise SystemExit(f"{error.code}: {error.read(1000).decode()}")
            asked = error.headers["retry-after"] or ""  # A date is for others; nobody makes us wait longer than an hour.
            delay = max(delay, min(3600, int(asked[:9]))) if asked.isascii() and asked.isdigit() else delay
        except (OSError, http.client.HTTPException) as error:
            print(f"retrying: {error}", file=sys.stderr)
        time.sleep(delay * random.uniform(1, 1.5))


def main(url, token_file, path):
    with open(token_file) as file:
        token = file.read().strip()
    db = sqlite3.connect(path, timeout=5, isolation_level=None)
    db.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, id text, event text)")
    db.execute("CREATE TABLE IF NOT EXISTS seen (id text PRIMARY KEY)")
    db.execute("CREATE TABLE IF NOT EXISTS feed_position (feed text PRIMARY KEY, cursor text NOT NULL)")
    db.execute("INSERT INTO feed_position VALUES (?, 'begin') ON CONFLICT DO NOTHING", [url])
    while True:
        (after,) = db.execute("SELECT cursor FROM feed_position WHERE feed = ?", [url]).fetchone()
        events, following = page(url, token, after)
        positions = [int(event["position"]) for event in events]
        behind = after.partition(".")[0]
        first = int(behind) + 1 if behind.isdigit() else next(iter(positions), 1)  # After begin or a time: whichever it is.
        if positions != list(range(first, first + len(events))):
            raise SystemExit(f"a hole behind {after}: {positions}")
        with db:  # Commits, or rolls back after an exception.
            db.execute("BEGIN IMMEDIATE")
            move = "UPDATE feed_position SET cursor = ? WHERE feed = ? AND cursor = ?"
            if db.execute(move, [following, url, after]).rowcount == 1:  # Else another process has done this work.
                for event in events:
                    if db.execute("INSERT INTO seen VALUES (?) ON CONFLICT DO NOTHING", [event["id"]]).rowcount == 1:
                        work(db, event)


if __name__ == "__main__":
    main(*sys.argv[1:])
