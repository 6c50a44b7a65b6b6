-- Messages that are delivered again after this are handled again.
DROP TABLE outbox_inbox;
