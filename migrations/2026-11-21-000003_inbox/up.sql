-- The inbox: the messages that the application of this database has handled, whoever sent them, so that
-- it handles each once. One for the database, found by the search path. Whoever handles a message
-- inserts it in the transaction that does the work (inbox::once); a row that is there already means that
-- the work was done before.
--
-- Texts compare as bytes, as in an outbox. Both fit into an entry of the index, which takes 2,704 bytes.
CREATE TABLE outbox_inbox (
    source     text COLLATE "C" NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    handled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT outbox_inbox_pkey PRIMARY KEY (source, message_id),
    CONSTRAINT outbox_inbox_source_has_a_length CHECK (octet_length(source) BETWEEN 1 AND 1024),
    CONSTRAINT outbox_inbox_message_id_has_a_length CHECK (octet_length(message_id) BETWEEN 1 AND 1024)
);
-- The cleaner takes the oldest, and finds at once that there are none. (BRIN would not: pages of removed rows
-- are used again, and soon each page has a young row beside the place of an old one.)
CREATE INDEX outbox_inbox_handled ON outbox_inbox (handled_at);
