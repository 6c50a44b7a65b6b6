-- Consumers of feeds begin again after this, and messages that are delivered again are handled again.
DROP TABLE outbox_feed_position;
DROP TABLE outbox_inbox;
