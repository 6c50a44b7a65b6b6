-- outbox_create(name) creates one outbox: its tables, functions and a view. outbox_create_endpoints(name) adds the tables
-- of endpoints, and outbox_create_feeds(name) those of feeds, if an application has any. These are functions instead of a list of CREATE statements, so that each
-- module of an application can create its own outbox in its own migration: SELECT outbox_create('org_outbox').
--
-- The name is an identifier, optionally with a schema: 'outbox', 'org_outbox', 'org.events', 'Order-Events'. Case is
-- kept, and the name is quoted wherever it is used. Each part has ASCII letters, digits, '_', '-' or '$', starts with a
-- letter or '_', and has at most 48 bytes, so that every derived name stays below the 63 bytes of PostgreSQL.
--
-- Returns the schema (NULL if none is given) and the table.
--
-- No function here calls anything that other roles have created in a schema of the caller's search path.
CREATE FUNCTION outbox_name_parts(name text) RETURNS text[]
LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    parts text[] := string_to_array(name, '.');
    part text;
BEGIN
    IF cardinality(parts) NOT IN (1, 2) THEN
        RAISE EXCEPTION 'bad outbox name %: expected name or schema.name', quote_literal(name)
            USING ERRCODE = 'invalid_name';
    END IF;
    FOREACH part IN ARRAY parts LOOP
        IF part !~ '^[A-Za-z_][A-Za-z0-9_$-]*$' OR octet_length(part) > 48 THEN
            RAISE EXCEPTION 'bad outbox name %: each part must start with a letter or _, contain only ASCII letters, digits, _, - and $, and have at most 48 bytes', quote_literal(name)
                USING ERRCODE = 'invalid_name';
        END IF;
    END LOOP;
    IF cardinality(parts) = 1 THEN
        parts := ARRAY[NULL, parts[1]];
    END IF;
    RETURN parts;
END
$function$;

-- After each INSERT into an outbox: notifies relays only if a relay sleeps. A relay takes the advisory lock (outbox, 1)
-- before it sleeps, and then checks for messages once more. So if this trigger gets the lock (shared with other
-- inserts), every relay will check after the end of this transaction. An unconditional NOTIFY would make all commits
-- wait for one another.
CREATE FUNCTION outbox_wake() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
BEGIN
    -- The oid of the table has 32 bits; the lock takes a signed number.
    IF NOT pg_catalog.pg_try_advisory_xact_lock_shared(TG_RELID::bigint::bit(32)::integer, 1) THEN
        PERFORM pg_catalog.pg_notify('outbox_' || TG_RELID::text, '');
    END IF;
    RETURN NULL;
END
$function$;

-- Refuses a new message that a rule forbids, as a CHECK constraint does. The trigger has the name of the rule.
CREATE FUNCTION outbox_refuse() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
BEGIN
    RAISE EXCEPTION 'new row for relation "%" violates "%"', TG_TABLE_NAME, TG_NAME
        USING ERRCODE = 'check_violation', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, CONSTRAINT = TG_NAME;
END
$function$;

-- Before each UPDATE of an endpoint, by any role: relays find changed rows by updated_at. The name stays:
-- waiting messages name the destination, and its secret may be encrypted for this name. With another tenant, the row is
-- another registration. A destination with another URL, or that is enabled again, has not failed yet: what its receiver has
-- asked for, and an open breaker, do not count any more. One with another URL or verification is not verified. Nobody has
-- disabled an enabled destination.
CREATE FUNCTION outbox_endpoint_changes() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    others record;
BEGIN
    IF NEW.name <> OLD.name THEN
        RAISE EXCEPTION 'an endpoint cannot be renamed: insert a new row and delete the old row'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    IF NEW.kind <> OLD.kind THEN
        RAISE EXCEPTION 'the kind of an endpoint stays: insert a new row and delete the old row'
            USING ERRCODE = 'feature_not_supported';
    END IF;
    NEW.id := OLD.id;
    IF NEW.tenant_id IS DISTINCT FROM OLD.tenant_id THEN
        NEW.id := gen_random_uuid();
        NEW.created_at := now();
    END IF;
    IF NEW.url <> OLD.url OR NEW.enabled > OLD.enabled THEN
        NEW.failing_since := NULL;
        EXECUTE format('DELETE FROM %I.%I WHERE kind = ''destination'' AND name = $1 AND paused_by IN (''relay'', ''receiver'')',
                TG_TABLE_SCHEMA, left(TG_TABLE_NAME, -9) || '_pause')
            USING NEW.name;
    END IF;
    IF NEW.enabled THEN
        NEW.disabled_by := NULL;
        NEW.disabled_reason := NULL;
    END IF;
    IF NEW.failing_since IS NULL THEN
        NEW.failing_reason := NULL;
        NEW.failing := false;
    END IF;
    IF NEW.url <> OLD.url OR NEW.verification IS DISTINCT FROM OLD.verification THEN
        NEW.verified_at := NULL;
        NEW.allowed_rate := NULL;
    END IF;
    IF NEW.url <> OLD.url OR NEW.verification IS DISTINCT FROM OLD.verification OR NEW.enabled > OLD.enabled THEN
        NEW.verification_due := NULL;
        NEW.verification_tries := 0;
        NEW.verification_error := NULL;
    END IF;
    -- Relays write these columns. The rest of the row is then the same, byte for byte (*=: json has no other equality).
    others := NEW;
    others.failing_since := OLD.failing_since;
    others.failing_reason := OLD.failing_reason;
    others.failing := OLD.failing;
    others.verification_due := OLD.verification_due;
    others.verification_tries := OLD.verification_tries;
    others.verification_error := OLD.verification_error;
    IF NEW *= OLD OR NOT others *= OLD THEN
        NEW.updated_at := clock_timestamp();
    END IF;
    RETURN NEW;
END
$function$;

-- After each change of endpoints: wakes sleeping relays, as outbox_wake() does. The table has the name
-- of the outbox followed by '_endpoint'.
CREATE FUNCTION outbox_endpoint_wake() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    outbox oid := to_regclass(format('%I.%I', TG_TABLE_SCHEMA, left(TG_TABLE_NAME, -9)));
BEGIN
    IF outbox IS NOT NULL AND NOT pg_try_advisory_xact_lock_shared(outbox::bigint::bit(32)::integer, 1) THEN
        PERFORM pg_notify('outbox_' || outbox::text, '');
    END IF;
    RETURN NULL;
END
$function$;

-- After endpoints are deleted, and before all are (TRUNCATE): records the removal beside the pauses, so
-- that relays end the waiting messages, even if no relay runs now. A destination that is inserted again deletes
-- this record. Pauses of the name stay, except those of its owner: a relay may have configured a destination of this name.
--
-- After endpoints are inserted, changed or deleted: records which. Relays read these rows, instead of all
-- destinations; each claim looks for new ones, so that a relay that has not read a new destination does so before it
-- decides where the claimed messages go.
CREATE FUNCTION outbox_endpoint_gone() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    pauses text := format('%I.%I', TG_TABLE_SCHEMA, left(TG_TABLE_NAME, -9) || '_pause');
    changed text := CASE TG_OP WHEN 'TRUNCATE' THEN format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME) ELSE 'rows' END;
BEGIN
    IF TG_OP IN ('DELETE', 'TRUNCATE') THEN
        EXECUTE format('INSERT INTO %s AS p (kind, name, reason) SELECT ''removed'', name, ''DESTINATION_REMOVED'' FROM %s ORDER BY name
            ON CONFLICT (kind, name, paused_by) DO UPDATE SET paused_at = clock_timestamp()',
            pauses, changed);
        EXECUTE format('DELETE FROM %s WHERE kind = ''destination'' AND paused_by = ''owner'' AND name IN (SELECT name FROM %s)',
            pauses, changed);
    ELSIF TG_OP = 'INSERT' THEN
        EXECUTE format('DELETE FROM %s WHERE kind = ''removed'' AND name IN (SELECT name FROM rows)',
            pauses);
    END IF;
    EXECUTE format('INSERT INTO %I.%I (name, is_new) SELECT name, %L FROM %s',
        TG_TABLE_SCHEMA, left(TG_TABLE_NAME, -9) || '_registration', TG_OP = 'INSERT', changed);
    RETURN NULL;
END
$function$;

-- After a feed is registered, or is given to another tenant, or is removed. A feed gets its row in _feed with its first event;
-- the row says which registration it belongs to. If the name had one before, positions continue: what the earlier registration
-- had is below the base, and nobody reads it. Nor do its tokens stay. A row that is restored before its endpoint stays as it is.
CREATE FUNCTION outbox_endpoint_feed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    outbox text := left(TG_TABLE_NAME, -9);
    feeds text := format('%I.%I', TG_TABLE_SCHEMA, outbox || '_feed');
    events text := format('%I.%I', TG_TABLE_SCHEMA, outbox || '_feed_event');
    feed text := CASE TG_OP WHEN 'DELETE' THEN OLD.name ELSE NEW.name END;
    -- Null: the endpoint is gone.
    registration uuid := CASE TG_OP WHEN 'DELETE' THEN NULL ELSE NEW.id END;
    moved integer;
BEGIN
    IF to_regclass(feeds) IS NULL THEN
        IF TG_OP = 'DELETE' THEN
            RETURN NULL;
        END IF;
        RAISE EXCEPTION 'the outbox % has no tables of feeds: create them with outbox_create_feeds', outbox
            USING ERRCODE = 'undefined_table';
    END IF;
    EXECUTE format('UPDATE %s SET registration = $2 WHERE name = $1 AND $2 IS NOT NULL AND registration IS DISTINCT FROM $2', feeds)
        USING feed, registration;
    GET DIAGNOSTICS moved = ROW_COUNT;
    IF moved > 0 THEN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'the feed % had another endpoint, whose last events a transaction of isolation level % may not see: register it in READ COMMITTED', feed, current_setting('transaction_isolation')
                USING ERRCODE = 'feature_not_supported';
        END IF;
        -- The row is locked, so this statement sees the last event.
        EXECUTE format('UPDATE %s f SET base = e.position, base_id = e.message_id, base_stored_at = e.stored_at
            FROM (SELECT position, message_id, stored_at FROM %s WHERE feed = $1 ORDER BY position DESC LIMIT 1) e
            WHERE f.name = $1 AND e.position > f.base', feeds, events)
            USING feed;
    END IF;
    EXECUTE format('DELETE FROM %I.%I r WHERE r.feed = $1
                      AND ($3 OR NOT EXISTS (SELECT FROM %s f WHERE f.name = $1 AND f.registration = $2))',
            TG_TABLE_SCHEMA, outbox || '_feed_reader', feeds)
        USING feed, registration, moved > 0;
    RETURN NULL;
END
$function$;

-- After endpoints are inserted or get a tenant: limits the destinations of each tenant to the argument of
-- the trigger, for every role. Destinations without a tenant belong to the application and have no limit. Concurrent
-- transactions do not see each other's rows, and may exceed the limit together.
CREATE FUNCTION outbox_endpoint_most() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    most bigint := TG_ARGV[0];
    -- Only tenants that gain destinations: after the limit is lowered, existing rows can still be changed.
    gained text := CASE TG_OP
        WHEN 'INSERT' THEN 'SELECT DISTINCT tenant_id FROM rows WHERE tenant_id IS NOT NULL'
        ELSE 'SELECT tenant_id FROM (SELECT tenant_id, 1 AS n FROM rows UNION ALL SELECT tenant_id, -1 FROM rows_before) b
               WHERE tenant_id IS NOT NULL GROUP BY tenant_id HAVING sum(n) > 0' END;
    tenant uuid;
BEGIN
    EXECUTE format('SELECT g.tenant_id FROM (%s) g
        WHERE (SELECT count(*) FROM (SELECT FROM %I.%I d WHERE d.tenant_id = g.tenant_id LIMIT $1 + 1) of_tenant) > $1 LIMIT 1',
        gained, TG_TABLE_SCHEMA, TG_TABLE_NAME) INTO tenant USING most;
    IF tenant IS NOT NULL THEN
        RAISE EXCEPTION 'the tenant % would have more than % endpoints', tenant, most
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_endpoints_of_a_tenant', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                HINT = format('SELECT outbox_endpoint_limit(%L, 5000) raises the limit', format('%s.%s', TG_TABLE_SCHEMA, left(TG_TABLE_NAME, -9)));
    END IF;
    RETURN NULL;
END
$function$;

-- The default message id: a UUID of version 7 (RFC 9562). Its first 48 bits are the milliseconds since 1970, so ids
-- created together are close together in an index.
CREATE FUNCTION outbox_message_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE AS $function$
    SELECT pg_catalog.encode(pg_catalog.set_bit(pg_catalog.set_bit(pg_catalog.overlay(
        pg_catalog.uuid_send(pg_catalog.gen_random_uuid()),
        pg_catalog.substring(pg_catalog.int8send(pg_catalog.floor(
            pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000)::pg_catalog.int8), 3),
        1, 6), 52, 1), 53, 1), 'hex')::pg_catalog.uuid
$function$;

-- The caller's search path decides the schema of an outbox without a schema, and where the other functions are. So the
-- path is read first, and then set to pg_catalog.
CREATE FUNCTION outbox_create(name text) RETURNS void
LANGUAGE plpgsql STRICT AS $function$
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    parts pg_catalog.text[] := outbox_name_parts(name);
    s pg_catalog.text := coalesce(parts[1], pg_catalog.current_schema()::pg_catalog.text);
    t pg_catalog.text := parts[2];
    wake pg_catalog.regproc := pg_catalog.to_regproc('outbox_wake');
    message_id pg_catalog.regproc := pg_catalog.to_regproc('outbox_message_id');
    refuse pg_catalog.regproc := pg_catalog.to_regproc('outbox_refuse');
    rule pg_catalog.text;
    condition pg_catalog.text;
    part pg_catalog.int4;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF s IS NULL OR to_regnamespace(quote_ident(s)) IS NULL THEN
        RAISE EXCEPTION 'cannot create outbox %: there is no schema %; CREATE SCHEMA first', name, coalesce(s, 'in the search path')
            USING ERRCODE = 'invalid_schema_name';
    END IF;
    IF to_regclass(format('%I.%I', s, t)) IS NOT NULL THEN
        RAISE EXCEPTION 'cannot create outbox %: a table of this name already exists', name
            USING ERRCODE = 'duplicate_table';
    END IF;
    -- Live messages only: pending, sending, retrying.
    --
    -- Topics and keys compare as bytes (COLLATE "C"), so an upgrade of the system's collations cannot corrupt their
    -- indexes.
    --
    -- A claim changes locked_by, locked_at and, for a message taken over from a dead relay, attempts and the last
    -- error. No index and no index predicate may name these columns: then a claim is a HOT update, and fillfactor
    -- leaves room for it in each page.
    --
    -- A key is stored only if the caller gave one, and a digest only if there is a key: random keys in an index bloat
    -- a table with age.
    --
    -- registration: the endpoint that the message is addressed to. A name that is registered again is
    -- another destination. Null: by its name alone, because no row had the name, or by its topic.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            sequence        bigint GENERATED ALWAYS AS IDENTITY,
            message_id      uuid NOT NULL DEFAULT %4$s(),
            topic           text COLLATE "C" NOT NULL,
            destination     text COLLATE "C" NOT NULL DEFAULT '',
            payload         json NOT NULL,
            headers         json,
            ordering_key    text COLLATE "C",
            idempotency_key text COLLATE "C",
            digest          bytea,
            tenant_id       uuid,
            available_at    timestamptz NOT NULL DEFAULT now(),
            expires_at      timestamptz,
            created_at      timestamptz NOT NULL DEFAULT now(),
            occurred_at     timestamptz,
            attempts        integer NOT NULL DEFAULT 0,
            locked_by       bigint,
            locked_at       timestamptz,
            last_attempt_at timestamptz,
            last_error_code text,
            last_error      text,
            split_from      bigint,
            split_to        text COLLATE "C",
            registration    uuid,
            CONSTRAINT %3$I PRIMARY KEY (sequence)
        ) WITH (
            fillfactor = 45,
            autovacuum_vacuum_scale_factor = 0.02,
            autovacuum_vacuum_threshold = 5000,
            autovacuum_vacuum_cost_limit = 2000,
            autovacuum_analyze_scale_factor = 0.02,
            autovacuum_analyze_threshold = 5000
        )$sql$, s, t, t || '_pkey', message_id);
    EXECUTE format('CREATE UNIQUE INDEX %3$I ON %1$I.%2$I (idempotency_key, destination) WHERE idempotency_key IS NOT NULL',
        s, t, t || '_idempotency');
    -- A claim reads the due messages of each topic and destination in this order, so it skips a paused destination as a
    -- whole. Messages with an ordering key have a separate index: most of them wait for an earlier message, and must
    -- not delay other messages.
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (topic, destination, available_at, sequence) WHERE ordering_key IS NULL',
        s, t, t || '_claim');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (topic, destination, available_at, sequence) WHERE ordering_key IS NOT NULL',
        s, t, t || '_claim_keyed');
    -- The order within each key. A message of a fan-out takes the place of the original message (split_from).
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (ordering_key, destination, (coalesce(split_from, sequence))) WHERE ordering_key IS NOT NULL',
        s, t, t || '_ordering');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (tenant_id) WHERE tenant_id IS NOT NULL',
        s, t, t || '_tenant');

    -- The messages of a fan-out: the application knows only the sequence of the original message.
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (split_from) WHERE split_from IS NOT NULL',
        s, t, t || '_parts');

    EXECUTE format('CREATE TRIGGER outbox_wake AFTER INSERT ON %1$I.%2$I FOR EACH STATEMENT EXECUTE FUNCTION %3$s()',
        s, t, wake);

    -- What a new message must satisfy. CHECK constraints would also be read, compiled and evaluated by each claim, which
    -- changes none of these columns: that took a tenth of a keyed settle. The conditions cost an INSERT the same.
    FOR rule, condition IN VALUES
        ('topic_is_1_to_255_bytes_without_spaces', $$NEW.topic <> '' AND octet_length(NEW.topic) <= 255 AND NEW.topic !~ '[[:space:][:cntrl:]]'$$),
        ('destination_is_at_most_255_bytes', 'octet_length(NEW.destination) <= 255'),
        ('ordering_key_is_at_most_1_kib', 'octet_length(NEW.ordering_key) <= 1024'),
        -- A replay has the key of the first message, followed by at most 34 bytes.
        ('key_is_1_to_255_bytes', $$NEW.idempotency_key <> '' AND octet_length(NEW.idempotency_key)
            <= CASE WHEN NEW.idempotency_key LIKE '%#replay-%' THEN 289 ELSE 255 END$$),
        ('headers_is_an_object', $$json_typeof(NEW.headers) = 'object'$$),
        ('headers_are_at_most_64_kib', 'octet_length(NEW.headers::text) <= 65536'),
        ('payload_is_at_most_1_mib', 'octet_length(NEW.payload::text) <= 1048576'),
        ('attempts_is_a_count', 'NEW.attempts BETWEEN 0 AND 1000000000')
    LOOP
        EXECUTE format('CREATE TRIGGER %3$I BEFORE INSERT ON %1$I.%2$I FOR EACH ROW WHEN (NOT (%4$s)) EXECUTE FUNCTION %5$s()',
            s, t, 'outbox_' || rule, condition, refuse);
    END LOOP;

    -- The ledger and the history are stored in a ring of parts, by time. New rows go into the open part. Rows older
    -- than the retention are removed with their whole part, by TRUNCATE. So retention deletes no single rows, and no
    -- index grows without limit. An empty part has no opened_at; the open part has no closed_at. Exactly one part is
    -- open. The first relay inserts the rows, so that a dump of the data alone can be restored into a new outbox.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            part      smallint NOT NULL,
            opened_at timestamptz,
            closed_at timestamptz,
            CONSTRAINT %3$I PRIMARY KEY (part)
        )$sql$, s, t || '_part', t || '_part_pkey');
    EXECUTE format('CREATE UNIQUE INDEX %3$I ON %1$I.%2$I ((true)) WHERE opened_at IS NOT NULL AND closed_at IS NULL',
        s, t || '_part', t || '_part_open');

    -- The ledger: the result of each message at each destination, the authoritative record. Entries are written once,
    -- and changed only to forget a tenant or a payload. A message that was dead-lettered, requeued and delivered has two
    -- entries.
    -- destination: the destination that was used; named_destination: the destination that the message named, or ''.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            part              smallint NOT NULL,
            sequence          bigint NOT NULL,
            message_id        uuid NOT NULL,
            topic             text NOT NULL,
            destination       text COLLATE "C" NOT NULL,
            named_destination text COLLATE "C" NOT NULL DEFAULT '',
            ordering_key      text,
            idempotency_key   text COLLATE "C",
            digest            bytea,
            tenant_id         uuid,
            status            text NOT NULL CHECK (status IN ('delivered', 'no_subscriber', 'dead')),
            reason            text,
            error             text,
            http_status       integer,
            response          text,
            attempts          integer NOT NULL,
            payload           json,
            headers           json,
            created_at        timestamptz NOT NULL,
            occurred_at       timestamptz,
            settled_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
            split_from        bigint,
            registration      uuid
        ) PARTITION BY LIST (part)$sql$, s, t || '_ledger');

    -- The history: failed attempts, repeats that were not sent, results that were discarded because the lease was lost
    -- (conflict), and actions of operators except settling, which the ledger records. A message that is delivered at the
    -- first attempt has no history.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            part        smallint NOT NULL,
            sequence    bigint NOT NULL,
            message_id  uuid NOT NULL,
            topic       text NOT NULL,
            destination text NOT NULL,
            tenant_id   uuid,
            event       text NOT NULL CHECK (event IN ('failed', 'retried', 'requeued', 'discarded', 'replayed', 'repeated', 'conflict')),
            attempt     integer,
            reason      text,
            error       text,
            http_status integer,
            response    text,
            took        interval,
            relay       text,
            operator    text,
            happened_at timestamptz NOT NULL DEFAULT clock_timestamp()
        ) PARTITION BY LIST (part)$sql$, s, t || '_attempt');
    FOR part IN 0..7 LOOP
        EXECUTE format('CREATE TABLE %1$I.%2$I PARTITION OF %1$I.%3$I FOR VALUES IN (%4$s)',
            s, t || '_ledger_' || part, t || '_ledger', part);
        EXECUTE format('CREATE TABLE %1$I.%2$I PARTITION OF %1$I.%3$I FOR VALUES IN (%4$s)',
            s, t || '_attempt_' || part, t || '_attempt', part);
    END LOOP;
    -- Rows are written in the order of time, so a BRIN index finds a time span at almost no cost. Ids of the library
    -- and of outbox_message_id are in the order of time, too, so their index grows at one end.
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I USING brin (settled_at) WITH (pages_per_range = 32, autosummarize = on)',
        s, t || '_ledger', t || '_ledger_settled');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (message_id)',
        s, t || '_ledger', t || '_ledger_id');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (idempotency_key) WHERE idempotency_key IS NOT NULL',
        s, t || '_ledger', t || '_ledger_key');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (message_id)',
        s, t || '_attempt', t || '_attempt_id');

    -- Retention: empties the parts that were closed longer ago than the retention. Opens the next part when the open
    -- part is older than a sixth of the retention. So an entry is kept for the retention, and up to a sixth longer. The
    -- function runs as its owner, so a relay needs no right to empty tables. emptied: the number of emptied parts; 0 if
    -- another transaction does the same. is_in_use: another transaction reads an old part, which stays until the next
    -- call.
    EXECUTE format($sql$
        CREATE FUNCTION %1$I.%2$I(retention interval, OUT emptied integer, OUT is_in_use boolean)
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $body$
        DECLARE
            open_part smallint;
            opened timestamptz;
            old smallint;
        BEGIN
            emptied := 0;
            is_in_use := false;
            SELECT part, opened_at INTO open_part, opened FROM %1$I.%3$I
             WHERE opened_at IS NOT NULL AND closed_at IS NULL FOR UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                -- No row says which part is open: the outbox is new, or its rows were lost. Settling writes into part 0
                -- until then. Other parts with entries count as closed just now, so that they are kept for the
                -- retention.
                IF NOT EXISTS (SELECT FROM %1$I.%3$I WHERE opened_at IS NOT NULL AND closed_at IS NULL) THEN
                    INSERT INTO %1$I.%3$I (part) SELECT generate_series(0, 7) ON CONFLICT DO NOTHING;
                    UPDATE %1$I.%3$I SET opened_at = clock_timestamp(), closed_at = NULL WHERE part = 0;
                    UPDATE %1$I.%3$I AS p SET opened_at = clock_timestamp(), closed_at = clock_timestamp()
                     WHERE opened_at IS NULL AND (EXISTS (SELECT FROM %1$I.%7$I e WHERE e.part = p.part)
                        OR EXISTS (SELECT FROM %1$I.%8$I e WHERE e.part = p.part));
                END IF;
                RETURN;
            END IF;
            -- The clock was ahead, and was set back: without this, the parts of that time would be kept until then.
            UPDATE %1$I.%3$I SET opened_at = clock_timestamp() WHERE opened_at > clock_timestamp();
            UPDATE %1$I.%3$I SET closed_at = clock_timestamp() WHERE closed_at > clock_timestamp();
            FOR old IN SELECT part FROM %1$I.%3$I WHERE closed_at <= clock_timestamp() - retention ORDER BY closed_at LOOP
                BEGIN
                    EXECUTE format('TRUNCATE %%I.%%I, %%I.%%I', %4$L, %5$L || old, %4$L, %6$L || old);
                EXCEPTION WHEN lock_not_available THEN
                    -- A reader of one part mostly reads all parts: waiting for each part would delay others.
                    is_in_use := true;
                    EXIT;
                END;
                UPDATE %1$I.%3$I SET opened_at = NULL, closed_at = NULL WHERE part = old;
                emptied := emptied + 1;
            END LOOP;
            DELETE FROM %1$I.%9$I WHERE at <= clock_timestamp() - retention;
            DELETE FROM %1$I.%10$I WHERE at <= clock_timestamp() - interval '24 hours';
            IF opened <= clock_timestamp() - retention / 6
               AND (EXISTS (SELECT FROM %1$I.%7$I WHERE part = open_part) OR EXISTS (SELECT FROM %1$I.%8$I WHERE part = open_part))
            THEN
                -- If the retention was made longer, all other parts may be in use: then this part stays open.
                SELECT part INTO old FROM %1$I.%3$I WHERE opened_at IS NULL ORDER BY (part - open_part + 8) %% 8 LIMIT 1;
                IF FOUND THEN
                    UPDATE %1$I.%3$I SET closed_at = clock_timestamp() WHERE part = open_part;
                    UPDATE %1$I.%3$I SET opened_at = clock_timestamp() WHERE part = old;
                END IF;
            END IF;
        END
        $body$$sql$, s, t || '_rotate', t || '_part', s, t || '_ledger_', t || '_attempt_', t || '_ledger', t || '_attempt', t || '_audit', t || '_request');
    EXECUTE format('REVOKE ALL ON FUNCTION %1$I.%2$I(interval) FROM PUBLIC', s, t || '_rotate');

    -- Payloads that are kept for a shorter time than their entries: blanks payload and headers of at most so many
    -- entries that were settled in this time span. Returns how many. The function runs as its owner, because a relay may
    -- not change the ledger.
    EXECUTE format($sql$
        CREATE FUNCTION %1$I.%2$I(since timestamptz, until timestamptz, most integer) RETURNS integer
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        DECLARE
            old smallint;
            count integer;
            blanked integer := 0;
        BEGIN
            FOR old IN SELECT part FROM %1$I.%3$I WHERE opened_at IS NOT NULL ORDER BY opened_at LOOP
                EXECUTE format('UPDATE %%1$I.%%2$I SET payload = NULL, headers = NULL WHERE ctid = ANY(ARRAY(
                        SELECT ctid FROM %%1$I.%%2$I WHERE settled_at >= $1 AND settled_at < $2
                           AND (payload IS NOT NULL OR headers IS NOT NULL) LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED))', %4$L, %5$L || old)
                    USING since, until, most - blanked;
                GET DIAGNOSTICS count = ROW_COUNT;
                blanked := blanked + count;
                EXIT WHEN blanked >= most;
            END LOOP;
            RETURN blanked;
        END
        $body$$sql$, s, t || '_blank', t || '_part', s, t || '_ledger_');
    EXECUTE format('REVOKE ALL ON FUNCTION %1$I.%2$I(timestamptz, timestamptz, integer) FROM PUBLIC', s, t || '_blank');

    -- Dead letters, with their content, until an operator requeues or discards them. A sequence may be used again
    -- (after a restore, or TRUNCATE ... RESTART IDENTITY), so a message is its sequence and its id. destination and named_destination:
    -- as in the ledger.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            sequence          bigint NOT NULL,
            message_id        uuid NOT NULL,
            topic             text NOT NULL,
            destination       text COLLATE "C" NOT NULL,
            named_destination text COLLATE "C" NOT NULL DEFAULT '',
            payload           json NOT NULL,
            headers           json,
            ordering_key      text COLLATE "C",
            idempotency_key   text COLLATE "C",
            digest            bytea,
            tenant_id         uuid,
            available_at      timestamptz NOT NULL,
            expires_at        timestamptz,
            created_at        timestamptz NOT NULL,
            occurred_at       timestamptz,
            attempts          integer NOT NULL,
            reason            text NOT NULL,
            last_error        text,
            http_status       integer,
            response          text,
            dead_lettered_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
            split_from        bigint,
            split_to          text COLLATE "C",
            blocks_key        boolean NOT NULL DEFAULT false,
            registration      uuid,
            CONSTRAINT %3$I PRIMARY KEY (sequence, message_id)
        )$sql$, s, t || '_dead', t || '_dead_pkey');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (message_id)',
        s, t || '_dead', t || '_dead_id');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (idempotency_key) WHERE idempotency_key IS NOT NULL',
        s, t || '_dead', t || '_dead_key');
    -- The latest dead letters of a destination, for the customer that registered it.
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (destination, dead_lettered_at, sequence)',
        s, t || '_dead', t || '_dead_dest');
    -- With on_dead = "block", a dead letter blocks its ordering key until it is requeued or discarded. Each claim of
    -- messages with keys checks this by the keys of the outbox. The index works only in the same collation.
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (ordering_key) WHERE blocks_key',
        s, t || '_dead', t || '_dead_blocks');

    -- One row for each start of a relay. The id is the fencing token: a late settle of an ended lease has no effect.
    -- The id is the time of registration in microseconds. So no id is assigned twice, even by a new primary that lacks
    -- the last rows of the old primary, or after the table was emptied. Of the single_active leases, the lease with the
    -- lowest id is active, and the others stand by. ended: a relay has seen that the lease expired; the lease never
    -- returns.
    -- serves: the topics and destinations whose messages the relay takes; null: the relay takes none.
    -- refuses: the endpoints that the relay does not serve because of its own settings, by reason; null:
    -- none.
    -- takeover_after: a session of the relay holds the advisory lock of the id. A relay that gets this lock may end the
    -- lease after this time; null: the lease ends only by time.
    -- listener_pid, listener_started: the server process of the relay's listener, which holds the lock that makes inserts
    -- notify.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            id            bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
            relay         text NOT NULL,
            started_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
            renewed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
            expires_at    timestamptz NOT NULL,
            single_active boolean NOT NULL DEFAULT false,
            ended         boolean NOT NULL DEFAULT false,
            serves        json,
            takeover_after interval CHECK (takeover_after BETWEEN interval '0' AND interval '1 day'),
            refuses       json,
            listener_pid  integer,
            listener_started timestamptz,
            settings      json,
            CONSTRAINT %3$I PRIMARY KEY (id)
        ) WITH (fillfactor = 50)$sql$, s, t || '_lease', t || '_lease_pkey');

    -- A relay locks the row 'keyed' while it claims messages with ordering keys, and a replay locks the row 'replay'. Not
    -- advisory locks: any role may take those. Who locks a row inserts it first.
    EXECUTE format('CREATE TABLE %1$I.%2$I (name text NOT NULL, CONSTRAINT %3$I PRIMARY KEY (name))',
        s, t || '_lock', t || '_lock_pkey');

    -- Paused destinations, topics and tenants: why, and until when (null: until resumed). paused_by: whose pause it is. Each hand has
    -- a row of its own, so that nobody ends the pause of another: the owner of an endpoint, an operator, the
    -- relays (the circuit breaker), or the receiver (its responses). openings: how often in a row a circuit breaker has
    -- opened. lasts: the time from the writing of paused_until to the end; if the server's clock goes back after it was
    -- written, the pause still ends no later than this from now. Also endpoints that were removed, and that
    -- waiting messages may name.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            kind         text NOT NULL CHECK (kind IN ('destination', 'topic', 'tenant', 'removed')),
            name         text NOT NULL,
            reason       text NOT NULL,
            paused_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
            paused_until timestamptz,
            openings     integer NOT NULL DEFAULT 0,
            lasts        interval CHECK (lasts BETWEEN '0 s' AND '2000 years'),
            paused_by    text NOT NULL DEFAULT 'operator' CHECK (paused_by IN ('owner', 'operator', 'relay', 'receiver')),
            CONSTRAINT %3$I PRIMARY KEY (kind, name, paused_by)
        )$sql$, s, t || '_pause', t || '_pause_pkey');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (kind, paused_at)',
        s, t || '_pause', t || '_pause_at');

    -- Patterns of topics. route and handler: what relays have ever served; a message whose topic meets one waits for such a
    -- relay. declared: the topics of the application; if there are any, a message of another topic waits if nobody wants
    -- it. no_subscriber: a topic whose messages have ended without a subscriber, and that never had one.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            pattern      text COLLATE "C" NOT NULL,
            kind         text NOT NULL CHECK (kind IN ('route', 'handler', 'declared', 'no_subscriber')),
            first_served timestamptz NOT NULL DEFAULT clock_timestamp(),
            last_served  timestamptz NOT NULL DEFAULT clock_timestamp(),
            CONSTRAINT %3$I PRIMARY KEY (kind, pattern)
        )$sql$, s, t || '_topic', t || '_topic_pkey');

    -- What operators and customers have done: who, to what (target), and why. Kept as long as the ledger. tenant_id: the
    -- tenant of a customer, whose budget has paid the cost.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            at        timestamptz NOT NULL DEFAULT clock_timestamp(),
            who       text NOT NULL,
            act       text NOT NULL,
            target    text NOT NULL,
            why       text NOT NULL,
            tenant_id uuid,
            cost      bigint NOT NULL DEFAULT 0
        )$sql$, s, t || '_audit');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (at)',
        s, t || '_audit', t || '_audit_at');

    -- Requests of programs with an Idempotency-Key, for 24 hours: a digest of the request, and the answer without secrets.
    -- status: null while the act runs. caller: who has sent it.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            caller text COLLATE "C" NOT NULL,
            key    text COLLATE "C" NOT NULL,
            digest bytea NOT NULL,
            at     timestamptz NOT NULL DEFAULT clock_timestamp(),
            status integer,
            answer text,
            CONSTRAINT %3$I PRIMARY KEY (caller, key)
        )$sql$, s, t || '_request', t || '_request_pkey');

    -- Every message with its status; cancelled messages, and those of a removed destination, are dead. idempotency_key is the message id if the caller gave
    -- no key. Example: SELECT status, count(*) FROM outbox_messages GROUP BY 1.
    EXECUTE format($sql$
        CREATE VIEW %1$I.%2$I AS
        SELECT sequence, message_id, topic, destination,
               CASE WHEN locked_by IS NOT NULL THEN 'sending'
                    WHEN attempts > 0 THEN 'retrying'
                    ELSE 'pending' END AS status,
               ordering_key, coalesce(idempotency_key, message_id::text) AS idempotency_key, tenant_id,
               created_at, occurred_at, available_at, expires_at, attempts, locked_by, locked_at,
               last_attempt_at, last_error_code, last_error, NULL::integer AS http_status,
               NULL::timestamptz AS settled_at
          FROM %1$I.%3$I
        UNION ALL
        SELECT sequence, message_id, topic, destination, 'dead',
               ordering_key, coalesce(idempotency_key, message_id::text), tenant_id,
               created_at, occurred_at, available_at, expires_at, attempts, NULL, NULL,
               dead_lettered_at, reason, last_error, http_status, dead_lettered_at
          FROM %1$I.%4$I
        UNION ALL
        SELECT sequence, message_id, topic, destination, status,
               ordering_key, coalesce(idempotency_key, message_id::text), tenant_id,
               created_at, occurred_at, NULL, NULL, attempts, NULL, NULL,
               settled_at, reason, error, http_status, settled_at
          FROM %1$I.%5$I
         WHERE status <> 'dead' OR reason IN ('CANCELLED', 'DESTINATION_REMOVED')$sql$,
        s, t || '_messages', t, t || '_dead', t || '_ledger');
    PERFORM set_config('search_path', path, true);
END
$function$;

-- Adds the tables of endpoints to an outbox, with their functions and triggers. An outbox without them delivers to
-- configured destinations and handlers. Running relays find the tables with their next claim. The new trigger waits for
-- the transactions that write to the outbox.
CREATE FUNCTION outbox_create_endpoints(name text) RETURNS void
LANGUAGE plpgsql STRICT AS $function$
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    parts pg_catalog.text[] := outbox_name_parts(name);
    -- The outbox that the name finds: it may stand behind the first schema of the path.
    s pg_catalog.text := coalesce(parts[1],
        (SELECT n.nspname::pg_catalog.text
           FROM pg_catalog.pg_class c
           JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
          WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(pg_catalog.quote_ident(parts[2]))::pg_catalog.oid),
        pg_catalog.current_schema()::pg_catalog.text);
    t pg_catalog.text := parts[2];
    changes pg_catalog.regproc := pg_catalog.to_regproc('outbox_endpoint_changes');
    changed pg_catalog.regproc := pg_catalog.to_regproc('outbox_endpoint_wake');
    feed pg_catalog.regproc := pg_catalog.to_regproc('outbox_endpoint_feed');
    gone pg_catalog.regproc := pg_catalog.to_regproc('outbox_endpoint_gone');
    most pg_catalog.regproc := pg_catalog.to_regproc('outbox_endpoint_most');
    rule pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF to_regclass(format('%I.%I', s, t)) IS NULL THEN
        RAISE EXCEPTION 'there is no outbox % in the schema %: create it with outbox_create', t, s
            USING ERRCODE = 'undefined_table';
    END IF;
    IF to_regclass(format('%I.%I', s, t || '_endpoint')) IS NOT NULL THEN
        RAISE EXCEPTION 'cannot create the endpoints of the outbox %: the table % already exists', name, t || '_endpoint'
            USING ERRCODE = 'duplicate_table';
    END IF;
    -- Endpoints: webhooks of an application's customers, and feeds, which they read instead (kind; no url). Plain SQL may
    -- write the rows; relays use a change within a second. mode, headers, concurrency, rate and timeout are as in outbox.toml; null: the default. policy
    -- has the other options of a destination: {"max_attempts": 5, "backoff": "5s,1m,1h", "classes": {"404": "dead"}}.
    -- secret: one or several secrets, newest first; older secrets sign until old_secrets_until. auth: authentication that
    -- the receiver asks for, JSON as in outbox.toml; plain or, like secret, encrypted. failing_since: the first
    -- failed send since the last successful one, and failing_reason its reason. failing: none has succeeded for ten minutes,
    -- which the event outbox.endpoint.failing tells. id: tells this registration from others of the same name.
    -- created_at: when the registering transaction began; messages of transactions that began earlier do not go there.
    -- verification: how the endpoint shows that it wants the messages, before the first is sent: challenge or cloudevents;
    -- until verified_at, messages wait or, with ':skip', do not go there. verification_due: the next try. disabled_by: who
    -- has disabled the destination; null: an operator. set_by: who has set a value, {"filter": "operator"}; a value of an
    -- operator is changed by operators only. A feed is failing if it has events and nobody has read it since failing_since,
    -- for OUTBOX_FEED_UNREAD_AFTER; the event outbox.endpoint.unread tells it.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            name              text COLLATE "C" NOT NULL,
            kind              text NOT NULL DEFAULT 'webhook',
            url               text NOT NULL DEFAULT '',
            topics            text[] NOT NULL DEFAULT '{*}',
            tenant_id         uuid,
            filter            json,
            enabled           boolean NOT NULL DEFAULT true,
            secret            text,
            old_secrets_until timestamptz,
            headers           json,
            auth              text,
            mode              text,
            concurrency       integer,
            rate              text,
            timeout           interval,
            policy            json,
            description       text,
            disabled_reason   text,
            created_at        timestamptz NOT NULL DEFAULT now(),
            updated_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
            failing_since     timestamptz,
            failing_reason    text,
            failing           boolean NOT NULL DEFAULT false,
            verification      text,
            verified_at       timestamptz,
            allowed_rate      text,
            verification_due  timestamptz,
            verification_tries integer NOT NULL DEFAULT 0,
            verification_error text,
            id                uuid NOT NULL DEFAULT gen_random_uuid(),
            disabled_by       text,
            set_by            json,
            CONSTRAINT %3$I PRIMARY KEY (name),
            CONSTRAINT outbox_endpoint_disabled_by_is_known CHECK (disabled_by IN ('owner', 'operator', 'relay', 'receiver')),
            CONSTRAINT outbox_endpoint_set_by_is_an_object CHECK (json_typeof(set_by) = 'object'),
            CONSTRAINT outbox_endpoint_verification_is_known CHECK (
                verification IN ('none', 'challenge', 'challenge:skip', 'cloudevents', 'cloudevents:skip')),
            CONSTRAINT outbox_endpoint_fails_since_a_time CHECK (NOT failing OR failing_since IS NOT NULL),
            CONSTRAINT outbox_endpoint_times_are_of_a_clock CHECK (
                updated_at >= '1970-01-01 00:00:00+00' AND updated_at < '9999-12-31 00:00:00+00' AND isfinite(failing_since)),
            -- The registration of messages for a configured destination.
            CONSTRAINT outbox_endpoint_id_is_not_zero CHECK (id <> '00000000-0000-0000-0000-000000000000'),
            CONSTRAINT outbox_endpoint_name_is_1_to_255_bytes_without_spaces CHECK (name <> '' AND octet_length(name) <= 255 AND name !~ '[[:space:][:cntrl:]]'),
            CONSTRAINT outbox_endpoint_kind_is_webhook_or_feed CHECK (kind IN ('webhook', 'feed')),
            CONSTRAINT outbox_endpoint_url_is_http_or_https CHECK (kind = 'feed' OR url ~* '^https?://.' AND octet_length(url) <= 2048),
            CONSTRAINT outbox_endpoint_url_of_a_feed_is_empty CHECK (kind <> 'feed' OR url = ''),
            CONSTRAINT outbox_endpoint_secret_of_a_feed_is_absent CHECK (kind <> 'feed' OR secret IS NULL AND auth IS NULL),
            CONSTRAINT outbox_endpoint_topics_are_1_to_100_patterns CHECK (
                cardinality(topics) >= 1 AND cardinality(topics) <= 100 AND array_position(topics, NULL) IS NULL AND array_position(topics, '') IS NULL
                AND octet_length(topics::text) <= 32768),
            CONSTRAINT outbox_endpoint_filter_is_an_object CHECK (json_typeof(filter) = 'object'),
            CONSTRAINT outbox_endpoint_filter_is_at_most_4_kib CHECK (octet_length(filter::text) <= 4096),
            CONSTRAINT outbox_endpoint_secret_is_at_most_4_kib CHECK (octet_length(secret) <= 4096),
            CONSTRAINT outbox_endpoint_auth_is_at_most_16_kib CHECK (octet_length(auth) <= 16384),
            CONSTRAINT outbox_endpoint_headers_are_an_object CHECK (json_typeof(headers) = 'object'),
            CONSTRAINT outbox_endpoint_headers_are_at_most_8_kib CHECK (octet_length(headers::text) <= 8192),
            CONSTRAINT outbox_endpoint_mode_is_known CHECK (mode IN ('binary', 'structured', 'batched')),
            CONSTRAINT outbox_endpoint_concurrency_is_1_to_64 CHECK (concurrency BETWEEN 1 AND 64),
            CONSTRAINT outbox_endpoint_timeout_is_1_ms_to_5_min CHECK (timeout BETWEEN interval '1 ms' AND interval '5 min'),
            CONSTRAINT outbox_endpoint_policy_is_an_object CHECK (json_typeof(policy) = 'object'),
            CONSTRAINT outbox_endpoint_policy_is_at_most_4_kib CHECK (octet_length(policy::text) <= 4096),
            CONSTRAINT outbox_endpoint_description_is_at_most_1_kib CHECK (octet_length(description) <= 1024),
            CONSTRAINT outbox_endpoint_disabled_reason_is_at_most_1_kib CHECK (octet_length(disabled_reason) <= 1024)
        )$sql$, s, t || '_endpoint', t || '_endpoint_pkey');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (tenant_id, name)',
        s, t || '_endpoint', t || '_endpoint_tenant');

    -- The state of an endpoint, as the commands and pages show it; null: there is none.
    EXECUTE format($sql$
        CREATE FUNCTION %1$I.%2$I(name text) RETURNS text
        LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $body$
            SELECT CASE
                WHEN NOT d.enabled THEN 'disabled'
                WHEN d.verification <> 'none' AND d.verified_at IS NULL THEN 'unverified'
                WHEN EXISTS (SELECT FROM %1$I.%4$I p
                    WHERE (p.kind = 'destination' AND p.name = d.name OR p.kind = 'tenant' AND lower(p.name) = d.tenant_id::text)
                    AND (p.paused_until IS NULL OR p.paused_until = '-infinity' OR p.paused_until > clock_timestamp())) THEN 'paused'
                WHEN d.failing AND d.kind = 'feed' THEN 'unread'
                WHEN d.failing THEN 'failing'
                ELSE 'active' END
              FROM %1$I.%3$I d WHERE d.name = $1
        $body$$sql$, s, t || '_endpoint_state', t || '_endpoint', t || '_pause');

    -- One row for each change of an endpoint lately: the transaction, and whether it has registered it. Relays
    -- delete the rows after a minute. No primary key: a transaction may change a row more than once.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            xid    bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
            name   text COLLATE "C" NOT NULL,
            is_new boolean NOT NULL DEFAULT false
        )$sql$, s, t || '_registration');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (xid)',
        s, t || '_registration', t || '_reg_xid');
    EXECUTE format('CREATE INDEX %3$I ON %1$I.%2$I (old_secrets_until) WHERE old_secrets_until IS NOT NULL',
        s, t || '_endpoint', t || '_endpoint_secrets');
    EXECUTE format('CREATE TRIGGER outbox_endpoint_changes BEFORE UPDATE ON %1$I.%2$I FOR EACH ROW EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', changes);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_wake AFTER INSERT OR UPDATE OR DELETE ON %1$I.%2$I FOR EACH STATEMENT EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', changed);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_gone AFTER DELETE ON %1$I.%2$I REFERENCING OLD TABLE AS rows FOR EACH STATEMENT EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', gone);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_emptied BEFORE TRUNCATE ON %1$I.%2$I FOR EACH STATEMENT EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', gone);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_there AFTER INSERT ON %1$I.%2$I REFERENCING NEW TABLE AS rows FOR EACH STATEMENT EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', gone);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_changed AFTER UPDATE ON %1$I.%2$I REFERENCING NEW TABLE AS rows FOR EACH STATEMENT EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', gone);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_feed AFTER INSERT ON %1$I.%2$I FOR EACH ROW WHEN (NEW.kind = ''feed'') EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', feed);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_feed_moved AFTER UPDATE ON %1$I.%2$I FOR EACH ROW WHEN (NEW.kind = ''feed'' AND NEW.id <> OLD.id) EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', feed);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_feed_gone AFTER DELETE ON %1$I.%2$I FOR EACH ROW WHEN (OLD.kind = ''feed'') EXECUTE FUNCTION %3$s()',
        s, t || '_endpoint', feed);
    -- Also for sessions with session_replication_role = replica: relays would not see the change otherwise.
    FOREACH rule IN ARRAY ARRAY['changes', 'wake', 'gone', 'emptied', 'there', 'changed', 'feed', 'feed_moved', 'feed_gone'] LOOP
        EXECUTE format('ALTER TABLE %I.%I ENABLE ALWAYS TRIGGER %I', s, t || '_endpoint', 'outbox_endpoint_' || rule);
    END LOOP;
    -- The limit for each tenant; outbox_endpoint_limit changes the limit.
    EXECUTE format('CREATE TRIGGER outbox_endpoint_most AFTER INSERT ON %1$I.%2$I REFERENCING NEW TABLE AS rows FOR EACH STATEMENT EXECUTE FUNCTION %3$s(1000)',
        s, t || '_endpoint', most);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_most_moved AFTER UPDATE ON %1$I.%2$I REFERENCING NEW TABLE AS rows OLD TABLE AS rows_before FOR EACH STATEMENT EXECUTE FUNCTION %3$s(1000)',
        s, t || '_endpoint', most);

    -- Addresses a new message to the registration that has the name now. The function runs as its owner, because roles
    -- that enqueue may not read endpoints.
    EXECUTE format($sql$
        CREATE FUNCTION %1$I.%2$I() RETURNS trigger
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        BEGIN
            SELECT id INTO NEW.registration FROM %1$I.%3$I WHERE name = NEW.destination;
            RETURN NEW;
        END
        $body$$sql$, s, t || '_address', t || '_endpoint');
    EXECUTE format('REVOKE ALL ON FUNCTION %1$I.%2$I() FROM PUBLIC', s, t || '_address');
    EXECUTE format($sql$
        CREATE TRIGGER outbox_address BEFORE INSERT ON %1$I.%2$I FOR EACH ROW
        WHEN (NEW.destination <> '' AND NEW.registration IS NULL) EXECUTE FUNCTION %1$I.%3$I()$sql$,
        s, t, t || '_address');
    PERFORM set_config('search_path', path, true);
END
$function$;

-- Adds the tables of feeds to an outbox, with their functions. A feed is a destination that is read instead of sent to.
CREATE FUNCTION outbox_create_feeds(name text) RETURNS void
LANGUAGE plpgsql STRICT AS $function$
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    parts pg_catalog.text[] := outbox_name_parts(name);
    -- The outbox that the name finds: it may stand behind the first schema of the path.
    s pg_catalog.text := coalesce(parts[1],
        (SELECT n.nspname::pg_catalog.text
           FROM pg_catalog.pg_class c
           JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
          WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass(pg_catalog.quote_ident(parts[2]))::pg_catalog.oid),
        pg_catalog.current_schema()::pg_catalog.text);
    t pg_catalog.text := parts[2];
    part pg_catalog.int4;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF s IS NULL OR to_regclass(format('%I.%I', s, t)) IS NULL THEN
        RAISE EXCEPTION 'cannot create the tables of feeds: there is no outbox %; create it with outbox_create first', name
            USING ERRCODE = 'undefined_table';
    END IF;
    IF to_regclass(format('%I.%I', s, t || '_feed')) IS NOT NULL THEN
        RAISE EXCEPTION 'cannot create the tables of feeds of %: a table of this name already exists', name
            USING ERRCODE = 'duplicate_table';
    END IF;
    -- Feeds. A settle locks the rows of its feeds until its commit, so the order of positions is that of commits, and only
    -- who empties a part changes a row. base, base_id, base_stored_at: position, message id and time of the last emptied event.
    -- registration: the id of the endpoint; null: the feed of a relay's settings.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            name           text COLLATE "C" NOT NULL,
            registration   uuid,
            base           bigint NOT NULL DEFAULT 0,
            base_id        uuid,
            base_stored_at timestamptz,
            CONSTRAINT %3$I PRIMARY KEY (name)
        ) WITH (fillfactor = 50)$sql$, s, t || '_feed', t || '_feed_pkey');

    -- The parts of the ring of events, as those of the ledger.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            part      smallint NOT NULL,
            opened_at timestamptz,
            closed_at timestamptz,
            CONSTRAINT %3$I PRIMARY KEY (part)
        )$sql$, s, t || '_feed_part', t || '_feed_part_pkey');
    EXECUTE format('CREATE UNIQUE INDEX %3$I ON %1$I.%2$I ((true)) WHERE opened_at IS NOT NULL AND closed_at IS NULL',
        s, t || '_feed_part', t || '_feed_open');

    -- The events of feeds. Written once, and changed only to forget a tenant or a payload (payload: null).
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            part         smallint NOT NULL,
            feed         text COLLATE "C" NOT NULL,
            position     bigint NOT NULL,
            message_id   uuid NOT NULL,
            sequence     bigint NOT NULL,
            topic        text NOT NULL,
            payload      json,
            headers      json,
            ordering_key text,
            tenant_id    uuid,
            created_at   timestamptz NOT NULL,
            occurred_at  timestamptz,
            stored_at    timestamptz NOT NULL DEFAULT clock_timestamp()
        ) PARTITION BY LIST (part)$sql$, s, t || '_feed_event');
    FOR part IN 0..7 LOOP
        EXECUTE format('CREATE TABLE %1$I.%2$I PARTITION OF %1$I.%3$I FOR VALUES IN (%4$s)',
            s, t || '_feed_event_' || part, t || '_feed_event', part);
        EXECUTE format('CREATE UNIQUE INDEX %3$I ON %1$I.%2$I (feed, position)',
            s, t || '_feed_event_' || part, t || '_feed_pos_' || part);
        -- For who removes what a message has said. Ids ascend, as rows do.
        EXECUTE format('CREATE INDEX ON %1$I.%2$I USING brin (message_id) WITH (autosummarize = on)',
            s, t || '_feed_event_' || part);
    END LOOP;

    -- Tokens of readers, as digests (SHA-256), and how far each has read; written at most once a minute.
    EXECUTE format($sql$
        CREATE TABLE %1$I.%2$I (
            feed          text COLLATE "C" NOT NULL,
            token_digest  bytea NOT NULL,
            created_at    timestamptz NOT NULL DEFAULT now(),
            valid_until   timestamptz,
            last_position bigint,
            last_read_at  timestamptz,
            CONSTRAINT %3$I PRIMARY KEY (feed, token_digest)
        )$sql$, s, t || '_feed_reader', t || '_reader_pkey');

    -- The position and the time of the last event of each of these feeds, and the part for the next ones. Each statement here
    -- sees what was committed before it, so the result is right for whoever holds the rows of the feeds. If the open part has
    -- events of a feed, the last one is there: a part has no events when it is opened, or all of them. A reader must not see what a crash
    -- can take back: the commit of the caller waits for the disk.
    EXECUTE format($sql$
        CREATE FUNCTION %1$I.%2$I(names text[]) RETURNS TABLE (feed text, last bigint, last_stored_at timestamptz, part smallint)
        LANGUAGE plpgsql VOLATILE AS $body$
        #variable_conflict use_column
        DECLARE
            open_part pg_catalog.int2 := (SELECT p.part FROM %1$I.%5$I p WHERE p.opened_at IS NOT NULL AND p.closed_at IS NULL);
        BEGIN
            IF pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN
                PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
            END IF;
            RETURN QUERY
                SELECT f.name, greatest(f.base, l.position), greatest(f.base_stored_at, l.stored_at),
                       coalesce(open_part, 0::pg_catalog.int2)
                  FROM %1$I.%4$I f LEFT JOIN LATERAL (
                      (SELECT e.position, e.stored_at FROM %1$I.%3$I e
                        WHERE e.part OPERATOR(pg_catalog.=) open_part AND e.feed OPERATOR(pg_catalog.=) f.name
                        ORDER BY e.position DESC LIMIT 1)
                      UNION ALL
                      (SELECT e.position, e.stored_at FROM %1$I.%3$I e WHERE e.feed OPERATOR(pg_catalog.=) f.name
                        ORDER BY e.position DESC LIMIT 1)
                      LIMIT 1) l ON true
                 WHERE f.name OPERATOR(pg_catalog.=) ANY (names);
        END
        $body$$sql$, s, t || '_feed_ends', t || '_feed_event', t || '_feed', t || '_feed_part');

    -- Retention: as the function of the ledger. Also empties the oldest parts while all have more bytes than most_bytes (null: no
    -- limit). While a part is emptied, no settle holds a feed.
    EXECUTE format($sql$
        CREATE FUNCTION %1$I.%2$I(retention interval, most_bytes bigint, OUT emptied integer, OUT is_in_use boolean)
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms' AS $body$
        DECLARE
            open_part smallint;
            opened timestamptz;
            old smallint;
            bytes bigint;
            of_part bigint;
        BEGIN
            emptied := 0;
            is_in_use := false;
            SELECT part, opened_at INTO open_part, opened FROM %1$I.%3$I
             WHERE opened_at IS NOT NULL AND closed_at IS NULL FOR UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                IF EXISTS (SELECT FROM %1$I.%3$I WHERE opened_at IS NOT NULL AND closed_at IS NULL) THEN
                    RETURN;
                END IF;
                INSERT INTO %1$I.%3$I (part) SELECT generate_series(0, 7) ON CONFLICT DO NOTHING;
                UPDATE %1$I.%3$I SET opened_at = clock_timestamp(), closed_at = NULL
                 WHERE part = (SELECT p.part FROM %1$I.%3$I p
                     WHERE NOT EXISTS (SELECT FROM %1$I.%5$I e WHERE e.part = p.part)
                        OR NOT EXISTS (SELECT FROM %1$I.%5$I e WHERE e.part <> p.part)
                     ORDER BY p.part LIMIT 1);
            END IF;
            -- What was stored while no part was open.
            UPDATE %1$I.%3$I AS p SET opened_at = clock_timestamp(), closed_at = clock_timestamp()
             WHERE opened_at IS NULL AND EXISTS (SELECT FROM %1$I.%5$I e WHERE e.part = p.part);
            -- If all have events, none is open until the oldest is old enough to be emptied.
            IF open_part IS NULL AND EXISTS (SELECT FROM %1$I.%3$I WHERE opened_at IS NOT NULL AND closed_at IS NULL) THEN
                RETURN;
            END IF;
            UPDATE %1$I.%3$I SET opened_at = clock_timestamp() WHERE opened_at > clock_timestamp();
            UPDATE %1$I.%3$I SET closed_at = clock_timestamp() WHERE closed_at > clock_timestamp();
            SELECT sum(pg_total_relation_size(inhrelid)) INTO bytes FROM pg_inherits WHERE inhparent = %8$L::regclass;
            FOR old IN SELECT part FROM %1$I.%3$I WHERE closed_at IS NOT NULL ORDER BY closed_at LOOP
                of_part := pg_total_relation_size(format('%%I.%%I', %4$L, %7$L || old));
                EXIT WHEN bytes <= coalesce(most_bytes, bytes)
                    AND NOT EXISTS (SELECT FROM %1$I.%3$I WHERE part = old AND closed_at <= clock_timestamp() - retention);
                BEGIN
                    PERFORM FROM %1$I.%6$I ORDER BY name FOR UPDATE;
                    EXECUTE format('LOCK TABLE %%I.%%I IN ACCESS EXCLUSIVE MODE', %4$L, %7$L || old);
                    EXECUTE format('UPDATE %1$I.%6$I f SET base = e.position, base_id = e.message_id, base_stored_at = e.stored_at
                          FROM %1$I.%6$I g, LATERAL (SELECT position, message_id, stored_at FROM %%I.%%I
                                WHERE feed = g.name ORDER BY position DESC LIMIT 1) e
                         WHERE g.name = f.name AND e.position > f.base', %4$L, %7$L || old);
                    EXECUTE format('TRUNCATE %%I.%%I', %4$L, %7$L || old);
                EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                    -- Somebody reads the part: waiting longer would delay others.
                    is_in_use := true;
                    EXIT;
                END;
                UPDATE %1$I.%3$I SET opened_at = NULL, closed_at = NULL WHERE part = old;
                bytes := bytes - of_part;
                emptied := emptied + 1;
            END LOOP;
            IF to_regclass(%9$L) IS NOT NULL THEN
                EXECUTE 'DELETE FROM %1$I.%6$I WHERE name IN (
                    SELECT f.name FROM %1$I.%6$I f
                     WHERE f.registration IS NOT NULL AND NOT EXISTS (SELECT FROM %1$I.%10$I d WHERE d.name = f.name AND d.id = f.registration)
                       AND NOT EXISTS (SELECT FROM %1$I.%5$I e WHERE e.feed = f.name)
                       FOR UPDATE SKIP LOCKED)';
            END IF;
            IF open_part IS NULL THEN
                RETURN;
            END IF;
            IF (opened <= clock_timestamp() - retention / 6
                OR pg_total_relation_size(format('%%I.%%I', %4$L, %7$L || open_part)) >= most_bytes / 6)
               AND EXISTS (SELECT FROM %1$I.%5$I WHERE part = open_part)
            THEN
                SELECT part INTO old FROM %1$I.%3$I WHERE opened_at IS NULL ORDER BY (part - open_part + 8) %% 8 LIMIT 1;
                IF FOUND THEN
                    UPDATE %1$I.%3$I SET closed_at = clock_timestamp() WHERE part = open_part;
                    UPDATE %1$I.%3$I SET opened_at = clock_timestamp() WHERE part = old;
                END IF;
            END IF;
        END
        $body$$sql$, s, t || '_feed_rotate', t || '_feed_part', s, t || '_feed_event', t || '_feed', t || '_feed_event_',
        format('%I.%I', s, t || '_feed_event'), format('%I.%I', s, t || '_endpoint'), t || '_endpoint');
    EXECUTE format('REVOKE ALL ON FUNCTION %1$I.%2$I(interval, bigint) FROM PUBLIC', s, t || '_feed_rotate');
    PERFORM set_config('search_path', path, true);
END
$function$;

-- Removes an outbox, with its endpoints and feeds.
CREATE FUNCTION outbox_drop(name text) RETURNS void
LANGUAGE plpgsql STRICT AS $function$
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    parts pg_catalog.text[] := outbox_name_parts(name);
    s pg_catalog.text := coalesce(parts[1], pg_catalog.current_schema()::pg_catalog.text);
    suffix pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    EXECUTE format('DROP VIEW IF EXISTS %I.%I', s, parts[2] || '_messages');
    EXECUTE format('DROP FUNCTION IF EXISTS %I.%I(text)', s, parts[2] || '_endpoint_state');
    EXECUTE format('DROP FUNCTION IF EXISTS %I.%I(interval)', s, parts[2] || '_rotate');
    EXECUTE format('DROP FUNCTION IF EXISTS %I.%I(timestamptz, timestamptz, integer)', s, parts[2] || '_blank');
    EXECUTE format('DROP FUNCTION IF EXISTS %I.%I(text[])', s, parts[2] || '_feed_ends');
    EXECUTE format('DROP FUNCTION IF EXISTS %I.%I(interval, bigint)', s, parts[2] || '_feed_rotate');
    FOREACH suffix IN ARRAY ARRAY['_feed_reader', '_feed_event', '_feed_part', '_feed', '_registration', '_endpoint', '_request', '_audit', '_topic', '_pause', '_lock', '_lease', '_dead', '_attempt', '_ledger', '_part', ''] LOOP
        -- An outbox without endpoints or feeds may stand beside tables of the application with these names.
        CONTINUE WHEN (suffix LIKE '\_feed%' OR suffix IN ('_registration', '_endpoint')) AND NOT EXISTS (
            SELECT FROM pg_attribute
             WHERE attrelid = to_regclass(format('%I.%I', s, parts[2] || suffix))
               AND attname = CASE suffix WHEN '_endpoint' THEN 'old_secrets_until' WHEN '_feed' THEN 'base_id'
                   WHEN '_feed_event' THEN 'stored_at' WHEN '_feed_reader' THEN 'token_digest' WHEN '_feed_part' THEN 'closed_at'
                   ELSE 'is_new' END);
        EXECUTE format('DROP TABLE IF EXISTS %I.%I', s, parts[2] || suffix);
    END LOOP;
    EXECUTE format('DROP FUNCTION IF EXISTS %I.%I()', s, parts[2] || '_address');
    PERFORM set_config('search_path', path, true);
END
$function$;

-- Sets how many endpoints each tenant of an outbox may have. Defaults to 1,000. Only the owner of the
-- table may set the limit: a role that registers destinations cannot.
CREATE FUNCTION outbox_endpoint_limit(name text, most integer) RETURNS void
LANGUAGE plpgsql STRICT AS $function$
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    parts pg_catalog.text[] := outbox_name_parts(name);
    s pg_catalog.text := coalesce(parts[1], pg_catalog.current_schema()::pg_catalog.text);
    t pg_catalog.text := parts[2];
    limits pg_catalog.regproc := pg_catalog.to_regproc('outbox_endpoint_most');
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF most < 1 THEN
        RAISE EXCEPTION 'the limit must be 1 endpoint or more, not %', most
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF to_regclass(format('%I.%I', s, t || '_endpoint')) IS NULL THEN
        RAISE EXCEPTION 'the outbox % has no tables of endpoints: create them with outbox_create_endpoints', name
            USING ERRCODE = 'undefined_table';
    END IF;
    EXECUTE format('DROP TRIGGER IF EXISTS outbox_endpoint_most ON %I.%I', s, t || '_endpoint');
    EXECUTE format('DROP TRIGGER IF EXISTS outbox_endpoint_most_moved ON %I.%I', s, t || '_endpoint');
    EXECUTE format('CREATE TRIGGER outbox_endpoint_most AFTER INSERT ON %1$I.%2$I REFERENCING NEW TABLE AS rows FOR EACH STATEMENT EXECUTE FUNCTION %3$s(%4$s)',
        s, t || '_endpoint', limits, most);
    EXECUTE format('CREATE TRIGGER outbox_endpoint_most_moved AFTER UPDATE ON %1$I.%2$I REFERENCING NEW TABLE AS rows OLD TABLE AS rows_before FOR EACH STATEMENT EXECUTE FUNCTION %3$s(%4$s)',
        s, t || '_endpoint', limits, most);
    PERFORM set_config('search_path', path, true);
END
$function$;
