"""Remembers in a SQLite file which events were handled, so that a repeated one is not again."""

import sqlite3
from contextlib import closing

SCHEMA = """
CREATE TABLE IF NOT EXISTS inbox (
    id text PRIMARY KEY,
    handled_at text NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE IF NOT EXISTS events (type text NOT NULL, event text NOT NULL);
"""


class Inbox:
    def __init__(self, path):
        self.path = path
        with closing(self.connect()) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(SCHEMA)

    def connect(self):
        # Waits for another writer for a second at most: the sender waits for the answer.
        return sqlite3.connect(self.path, timeout=1, isolation_level=None)

    def handle(self, events, work):
        """Calls `work(db, event)` for each event that is new, and says for each whether it was.

        The ids are written in the transaction of the work: both are there, or neither. A crash
        before the commit leaves nothing, so the repeat is new; after it, the repeat is known.
        """
        with closing(self.connect()) as db:
            # The write lock at once: two requests with one event come one after the other.
            db.execute("BEGIN IMMEDIATE")
            news = []
            for event in events:
                # By id alone: it is a UUID, and of a binary event nothing else is signed.
                insert = "INSERT INTO inbox (id) VALUES (?) ON CONFLICT DO NOTHING"
                is_new = db.execute(insert, [event.get_id()]).rowcount == 1
                if is_new:
                    work(db, event)
                news.append(is_new)
            # Without it (an error above) closing rolls back.
            db.execute("COMMIT")
            return news
