-- The tables that outbox-pattern-processor 0.4 works on, with the indexes that its database/README.md asks for.
CREATE TABLE outbox (
    idempotent_key uuid PRIMARY KEY,
    partition_key uuid NOT NULL,
    destinations jsonb NOT NULL,
    headers jsonb,
    payload text NOT NULL,
    attempts int NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    process_after timestamptz NOT NULL DEFAULT now(),
    processed_at timestamptz
);
CREATE INDEX ON outbox (partition_key);
CREATE INDEX ON outbox (process_after);
CREATE INDEX ON outbox (processed_at);
CREATE INDEX ON outbox (partition_key, process_after);
CREATE INDEX ON outbox (partition_key, process_after, attempts) WHERE processed_at IS NULL;
CREATE TABLE outbox_lock (
    partition_key uuid NOT NULL,
    lock_id uuid NOT NULL,
    processed_at timestamptz,
    processing_until timestamptz NOT NULL DEFAULT now() + interval '30 seconds'
);
CREATE UNIQUE INDEX ON outbox_lock (partition_key) WHERE processed_at IS NULL;
CREATE INDEX ON outbox_lock (lock_id);
CREATE INDEX ON outbox_lock (processing_until) WHERE processed_at IS NULL;
CREATE INDEX ON outbox_lock (processed_at);
CREATE INDEX ON outbox_lock (partition_key, processing_until);
CREATE TABLE outbox_cleaner_schedule (
    cron_expression varchar(50) NOT NULL,
    last_execution timestamptz NOT NULL DEFAULT now()
);
