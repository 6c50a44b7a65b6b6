-- The inbox: the messages of all senders that the application of this database has handled, so that the application
-- handles each message once. A database has one inbox, found by the search path. The transaction that does the work
-- inserts the message (inbox::once). An existing row means that the work is already done.
--
-- Texts compare as bytes, as in an outbox. Both columns together fit into an index entry (at most 2,704 bytes).
CREATE TABLE outbox_inbox (
    source     text COLLATE "C" NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    handled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT outbox_inbox_pkey PRIMARY KEY (source, message_id),
    CONSTRAINT outbox_inbox_source_has_a_length CHECK (octet_length(source) BETWEEN 1 AND 1024),
    CONSTRAINT outbox_inbox_message_id_has_a_length CHECK (octet_length(message_id) BETWEEN 1 AND 1024)
);
-- The cleaner deletes the oldest rows, and sees at once if there are none. A BRIN index cannot do this: pages of
-- deleted rows are reused, and soon every page has new rows next to old rows.
CREATE INDEX outbox_inbox_handled ON outbox_inbox (handled_at);
-- The positions of the consumers of feeds in this database: where each continues. The transaction that does the work of
-- an event locks the row, compares it with the position that the event continues, and writes the event's own
-- (feed::consume). So each event has its effect once, also where two processes are one consumer.
CREATE TABLE outbox_feed_position (
    consumer   text COLLATE "C" NOT NULL,
    feed       text COLLATE "C" NOT NULL,
    -- A cursor of the feed; before the first answer of its server: begin, end or a time.
    cursor     text COLLATE "C" NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT outbox_feed_position_pkey PRIMARY KEY (consumer, feed),
    CONSTRAINT outbox_feed_position_consumer_has_a_length CHECK (octet_length(consumer) BETWEEN 1 AND 1024),
    CONSTRAINT outbox_feed_position_feed_has_a_length CHECK (octet_length(feed) BETWEEN 1 AND 1024),
    CONSTRAINT outbox_feed_position_cursor_has_a_length CHECK (octet_length(cursor) BETWEEN 1 AND 100)
);
