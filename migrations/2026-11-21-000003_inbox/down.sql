-- What comes again after this is handled again.
DROP TABLE outbox_inbox;
