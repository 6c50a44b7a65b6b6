"""Records handled events in a SQLite file, so that a repeated event is not handled again."""

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
        # Wait at most five seconds for other writers: the sender is waiting for the response.
        return sqlite3.connect(self.path, timeout=5, isolation_level=None)

    def handle(self, events, work):
        """Calls `work(db, event)` for each new event. Returns for each event whether it was new.

        The ids are written in the transaction of the work: both are stored, or neither. After a crash
        before the commit, a repeat is new; after the commit, a repeat is known.
        """
        with closing(self.connect()) as db:
            # Take the write lock at once, so that two requests with the same event cannot overlap.
            db.execute("BEGIN IMMEDIATE")
            news = []
            for event in events:
                # The id alone is enough: it is a UUID, and the only signed attribute of a binary event.
                insert = "INSERT INTO inbox (id) VALUES (?) ON CONFLICT DO NOTHING"
                is_new = db.execute(insert, [event.get_id()]).rowcount == 1
                if is_new:
                    work(db, event)
                news.append(is_new)
            # After an error above, closing the connection rolls back.
            db.execute("COMMIT")
            return news
