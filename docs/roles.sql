-- Roles with minimal rights for one outbox.
--
-- They cannot log in: GRANT outbox_enqueuer TO the role of your application, and outbox_relay TO the
-- role of the relay. Roles belong to the server, not to a database: leave out the CREATE ROLE lines if
-- the roles exist.
CREATE ROLE outbox_enqueuer;
CREATE ROLE outbox_canceller;
CREATE ROLE outbox_registrar;
CREATE ROLE outbox_relay;
CREATE ROLE outbox_reader;
CREATE ROLE outbox_receiver;

-- Enqueues (by the library and by plain SQL): inserts messages, and finds existing keys. It cannot
-- read topics or payloads. If plain SQL and the library write the same keys, the library has to
-- compute digests: then GRANT SELECT (topic, payload), too.
GRANT INSERT (message_id, topic, destination, payload, headers, ordering_key, idempotency_key,
    digest, tenant_id, available_at, expires_at, occurred_at), SELECT (sequence, message_id,
    destination, idempotency_key, digest) ON "outbox" TO outbox_enqueuer;
GRANT EXECUTE ON FUNCTION outbox_message_id() TO outbox_enqueuer;

-- Cancels and reschedules waiting messages (Outbox::cancel, Outbox::reschedule). GRANT it in addition
-- to outbox_enqueuer. It can remove any waiting message.
GRANT DELETE, SELECT (sequence, message_id, topic, destination, payload, ordering_key,
    idempotency_key, digest, tenant_id, available_at, created_at, occurred_at, attempts, locked_by,
    split_from, registration), UPDATE (available_at) ON "outbox" TO outbox_canceller;
GRANT SELECT, INSERT ON "outbox_ledger" TO outbox_canceller;
GRANT SELECT ON "outbox_part" TO outbox_canceller;
GRANT SELECT (sequence, message_id, destination, named_destination, idempotency_key, reason,
    split_from) ON "outbox_dead" TO outbox_canceller;

-- Registers endpoints with their secrets (by Outbox::endpoints and by plain SQL), shows their
-- deliveries, sends messages again, and makes waiting messages due. GRANT it in addition to
-- outbox_enqueuer to an application whose customers register webhooks. It writes pauses, because
-- removing an endpoint inserts one. It can requeue any dead letter.
GRANT SELECT (sequence, message_id, topic, destination, ordering_key, idempotency_key, tenant_id,
    available_at, expires_at, created_at, occurred_at, attempts, locked_by, locked_at,
    last_error_code, last_error, split_from, registration), INSERT (sequence, message_id, topic,
    destination, payload, headers, ordering_key, idempotency_key, digest, tenant_id, expires_at,
    created_at, occurred_at, split_from, split_to, registration), UPDATE (available_at) ON "outbox"
    TO outbox_registrar;
GRANT SELECT ON "outbox_ledger" TO outbox_registrar;
GRANT SELECT, INSERT ON "outbox_attempt" TO outbox_registrar;
GRANT SELECT ON "outbox_part" TO outbox_registrar;
GRANT SELECT, DELETE, UPDATE (blocks_key) ON "outbox_dead" TO outbox_registrar;
GRANT SELECT ON "outbox_lease" TO outbox_registrar;
GRANT INSERT, SELECT (at, tenant_id, cost) ON "outbox_audit" TO outbox_registrar;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_request" TO outbox_registrar;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_endpoint" TO outbox_registrar;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_pause" TO outbox_registrar;
GRANT SELECT, INSERT ON "outbox_topic" TO outbox_registrar;
GRANT INSERT ON "outbox_registration" TO outbox_registrar;
GRANT SELECT, INSERT, UPDATE ON "outbox_feed" TO outbox_registrar;
GRANT SELECT ON "outbox_feed_event" TO outbox_registrar;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_feed_reader" TO outbox_registrar;
GRANT EXECUTE ON FUNCTION outbox_message_id() TO outbox_registrar;

-- Runs a relay, and all commands of an operator except migrate, forget and
-- message expunge. INSERT is for fan-outs and requeued
-- messages; UPDATE on one column of the dead letters allows locking them.
GRANT SELECT, DELETE, INSERT (sequence, message_id, topic, destination, payload, headers,
    ordering_key, idempotency_key, digest, tenant_id, available_at, expires_at, created_at,
    occurred_at, attempts, last_attempt_at, last_error_code, last_error, split_from, split_to,
    registration), UPDATE (destination, available_at, expires_at, attempts, locked_by, locked_at,
    last_attempt_at, last_error_code, last_error, split_to, registration) ON "outbox" TO
    outbox_relay;
GRANT SELECT, INSERT ON "outbox_ledger" TO outbox_relay;
GRANT SELECT, INSERT ON "outbox_attempt" TO outbox_relay;
GRANT SELECT ON "outbox_part" TO outbox_relay;
GRANT SELECT, INSERT, DELETE, UPDATE (blocks_key) ON "outbox_dead" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_lease" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE ON "outbox_lock" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_pause" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_topic" TO outbox_relay;
GRANT SELECT, INSERT ON "outbox_audit" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_request" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_endpoint" TO outbox_relay;
GRANT SELECT, INSERT, DELETE ON "outbox_registration" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE ON "outbox_feed" TO outbox_relay;
GRANT SELECT, INSERT ON "outbox_feed_event" TO outbox_relay;
GRANT SELECT ON "outbox_feed_part" TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON "outbox_feed_reader" TO outbox_relay;
GRANT SELECT ON "outbox_messages" TO outbox_relay;
GRANT EXECUTE ON FUNCTION outbox_message_id() TO outbox_relay;
GRANT EXECUTE ON FUNCTION "outbox_rotate"(interval) TO outbox_relay;
GRANT EXECUTE ON FUNCTION "outbox_blank"(timestamptz, timestamptz, integer) TO outbox_relay;
GRANT EXECUTE ON FUNCTION "outbox_feed_rotate"(interval, bigint) TO outbox_relay;
GRANT SELECT ON SEQUENCE "outbox_sequence_seq" TO outbox_relay;

-- Reads: status, dead list, pause list, the view. It cannot see payloads, headers, secrets or the URLs of
-- endpoints, which may have passwords, but it can see responses of receivers in dead letters.
GRANT SELECT (sequence, message_id, topic, destination, ordering_key, idempotency_key, tenant_id,
    available_at, expires_at, created_at, occurred_at, attempts, locked_by, locked_at,
    last_attempt_at, last_error_code, last_error, split_from, split_to, registration) ON "outbox" TO
    outbox_reader;
GRANT SELECT (sequence, message_id, topic, destination, named_destination, ordering_key,
    idempotency_key, tenant_id, available_at, expires_at, created_at, occurred_at, attempts, reason,
    last_error, http_status, response, dead_lettered_at, split_from, split_to, blocks_key,
    registration) ON "outbox_dead" TO outbox_reader;
GRANT SELECT ON "outbox_lease" TO outbox_reader;
GRANT SELECT ON "outbox_pause" TO outbox_reader;
GRANT SELECT ON "outbox_topic" TO outbox_reader;
GRANT SELECT ON "outbox_audit" TO outbox_reader;
GRANT SELECT (name, kind, topics, tenant_id, filter, enabled, mode, concurrency, rate, timeout,
    policy, description, disabled_reason, created_at, updated_at, failing_since, failing_reason,
    failing, verification, verified_at, allowed_rate, verification_due, verification_tries,
    disabled_by, set_by, verification_error, id) ON "outbox_endpoint" TO outbox_reader;
GRANT SELECT ON "outbox_feed" TO outbox_reader;
GRANT SELECT (feed, position, stored_at) ON "outbox_feed_event" TO outbox_reader;
GRANT SELECT (feed, created_at, valid_until, last_position, last_read_at) ON "outbox_feed_reader"
    TO outbox_reader;
GRANT SELECT ON "outbox_messages" TO outbox_reader;
GRANT SELECT ON SEQUENCE "outbox_sequence_seq" TO outbox_reader;

-- Handles each message once (inbox::once). The database has one inbox.
GRANT INSERT (source, message_id) ON outbox_inbox TO outbox_receiver;
-- Reads feeds, and keeps its positions (feed::consume).
GRANT SELECT, INSERT, UPDATE ON outbox_feed_position TO outbox_receiver;
-- If the relay cleans the inbox (OUTBOX_INBOX_RETENTION):
GRANT SELECT, DELETE ON outbox_inbox TO outbox_relay;
