-- Roles with what they need for one outbox, and no more.
--
-- They cannot log in: GRANT outbox_enqueuer TO the role of your application, GRANT outbox_relay TO the
-- one of the relay. Roles belong to the server, not to a database: leave these lines out where they
-- are there already.
CREATE ROLE outbox_enqueuer;
CREATE ROLE outbox_canceller;
CREATE ROLE outbox_registrar;
CREATE ROLE outbox_relay;
CREATE ROLE outbox_reader;
CREATE ROLE outbox_receiver;

-- Enqueues (the library, and plain SQL): inserts, and finds a key that is there already. It reads
-- no topic and no payload. Where one key is written by both, plain SQL and the library, the library
-- has to compute a digest: then GRANT SELECT (topic, payload), too.
GRANT INSERT (message_id, topic, destination, payload, headers, ordering_key, idempotency_key,
    digest, tenant_id, available_at, expires_at, occurred_at), SELECT (sequence, message_id,
    destination, idempotency_key, digest) ON "outbox" TO outbox_enqueuer;

-- Cancels and reschedules what waits (Outbox::cancel, Outbox::reschedule): GRANT it beside
-- outbox_enqueuer to an application that does. It can remove any message that waits.
GRANT DELETE, SELECT (sequence, message_id, topic, destination, payload, ordering_key,
    idempotency_key, digest, tenant_id, available_at, created_at, occurred_at, attempts, locked_by,
    split_from), UPDATE (available_at) ON "outbox" TO outbox_canceller;
GRANT SELECT, INSERT ON "outbox_ledger" TO outbox_canceller;
GRANT SELECT ON "outbox_part" TO outbox_canceller;
GRANT SELECT (sequence, message_id, destination, named_destination, idempotency_key, reason,
    split_from) ON "outbox_dead" TO outbox_canceller;

-- Registers destinations (Outbox::destinations, and plain SQL), with their secrets, shows what became of
-- their messages, and sends these again: GRANT it beside outbox_enqueuer to an application whose customers
-- register webhooks. What is removed is noted among the pauses. It can requeue any dead letter.
GRANT SELECT (sequence, message_id, topic, destination, ordering_key, idempotency_key, tenant_id,
    available_at, expires_at, created_at, occurred_at, attempts, locked_by, locked_at,
    last_error_code, last_error, split_from), INSERT (sequence, message_id, topic, destination,
    payload, headers, ordering_key, idempotency_key, digest, tenant_id, expires_at, created_at,
    occurred_at, split_from) ON "outbox" TO outbox_registrar;
GRANT SELECT ON "outbox_ledger" TO outbox_registrar;
GRANT SELECT, INSERT ON "outbox_attempt" TO outbox_registrar;
GRANT SELECT ON "outbox_part" TO outbox_registrar;
GRANT SELECT, DELETE, UPDATE (blocks_key) ON "outbox_dead" TO outbox_registrar;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_destination" TO outbox_registrar;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_pause" TO outbox_registrar;

-- Runs a relay, and all of an operator's commands but migrate. It inserts the parts of a fan-out
-- and what is requeued; UPDATE on a column of the dead letters lets it lock them.
GRANT SELECT, DELETE, INSERT (sequence, message_id, topic, destination, payload, headers,
    ordering_key, idempotency_key, digest, tenant_id, available_at, expires_at, created_at,
    occurred_at, attempts, last_attempt_at, last_error_code, last_error, split_from), UPDATE
    (available_at, attempts, locked_by, locked_at, last_attempt_at, last_error_code, last_error) ON
    "outbox" TO outbox_relay;
GRANT SELECT, INSERT ON "outbox_ledger" TO outbox_relay;
GRANT SELECT, INSERT ON "outbox_attempt" TO outbox_relay;
GRANT SELECT ON "outbox_part" TO outbox_relay;
GRANT SELECT, INSERT, DELETE, UPDATE (blocks_key) ON "outbox_dead" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_lease" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_pause" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_destination" TO outbox_relay;
GRANT SELECT ON "outbox_messages" TO outbox_relay;
GRANT EXECUTE ON FUNCTION "outbox_rotate"(interval) TO outbox_relay;

-- Looks: status, dead list, pause list, the view. It sees no payloads, no headers and no secrets (but
-- answers of receivers, in dead letters).
GRANT SELECT (sequence, message_id, topic, destination, ordering_key, idempotency_key, tenant_id,
    available_at, expires_at, created_at, occurred_at, attempts, locked_by, locked_at,
    last_attempt_at, last_error_code, last_error, split_from) ON "outbox" TO outbox_reader;
GRANT SELECT (sequence, message_id, topic, destination, named_destination, ordering_key,
    idempotency_key, tenant_id, available_at, expires_at, created_at, occurred_at, attempts, reason,
    last_error, http_status, response, died_at, split_from, blocks_key) ON "outbox_dead" TO
    outbox_reader;
GRANT SELECT ON "outbox_lease" TO outbox_reader;
GRANT SELECT ON "outbox_pause" TO outbox_reader;
GRANT SELECT (name, url, topics, tenant_id, filter, enabled, mode, concurrency, rate, timeout,
    description, disabled_reason, created_at, updated_at) ON "outbox_destination" TO outbox_reader;
GRANT SELECT ON "outbox_messages" TO outbox_reader;

-- Handles each message once (inbox::once). The inbox is one for the database.
GRANT INSERT (source, message_id) ON outbox_inbox TO outbox_receiver;
-- Where the relay is to clean it (OUTBOX_INBOX_RETENTION):
GRANT SELECT, DELETE ON outbox_inbox TO outbox_relay;
