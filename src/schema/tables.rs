//! What `outbox_tables!` declares, whatever the names. A test compares it with the database.

/// The one definition: first the names in SQL, then those of the modules.
#[doc(hidden)]
#[macro_export]
macro_rules! __outbox_tables {
    (
        ($($of_outbox:tt)+) ($($of_ledger:tt)+) ($($of_attempt:tt)+) ($($of_dead:tt)+)
        ($($of_lease:tt)+) ($($of_pause:tt)+) ($($of_destination:tt)+) ($($of_messages:tt)+)
        $outbox:ident $ledger:ident $attempt:ident $dead:ident $lease:ident $pause:ident $destination:ident
        $messages:ident
    ) => {
        const _: () = $crate::schema::check_names(
            stringify!($outbox),
            &[
                (stringify!($ledger), "_ledger"),
                (stringify!($attempt), "_attempt"),
                (stringify!($dead), "_dead"),
                (stringify!($lease), "_lease"),
                (stringify!($pause), "_pause"),
                (stringify!($destination), "_destination"),
                (stringify!($messages), "_messages"),
            ],
        );

        diesel::table! {
            /// Live messages: pending, sending, retrying.
            $($of_outbox)+ (sequence) {
                /// Given by the database, in the order of the inserts.
                sequence -> diesel::sql_types::BigInt,
                /// What receivers see as `webhook-id` and `ce-id`.
                message_id -> diesel::sql_types::Uuid,
                /// What it is about; routes go by it.
                topic -> diesel::sql_types::Text,
                /// Empty: routed by its topic.
                destination -> diesel::sql_types::Text,
                /// JSON, kept byte for byte.
                payload -> diesel::sql_types::Json,
                /// A JSON object of texts.
                headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// Messages of one key are delivered in order.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Unique together with the destination; null: the caller gave none.
                idempotency_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// SHA-256 of topic and payload, where there is a key; plain inserts give none.
                digest -> diesel::sql_types::Nullable<diesel::sql_types::Binary>,
                /// The tenant that it belongs to.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// Not sent before.
                available_at -> diesel::sql_types::Timestamptz,
                /// Not sent after.
                expires_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When it was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Outcomes of sends.
                attempts -> diesel::sql_types::Integer,
                /// The lease that holds it; the relay's.
                locked_by -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// Since when; the relay's.
                locked_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the last attempt failed; null: none has.
                last_attempt_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Why the last attempt failed: a reason code.
                last_error_code -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The same in words.
                last_error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Of a part of a fan-out: the sequence of the whole.
                split_from -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
            }
        }

        diesel::table! {
            /// What became of each message at each destination. The table has no primary key, which Diesel wants:
            /// do not use `find`.
            $($of_ledger)+ (message_id, destination, settled_at) {
                /// Which of the eight parts (0 to 7), which retention empties in turn, holds the entry.
                part -> diesel::sql_types::SmallInt,
                /// Of the message that was settled.
                sequence -> diesel::sql_types::BigInt,
                /// What receivers saw.
                message_id -> diesel::sql_types::Uuid,
                /// Its topic.
                topic -> diesel::sql_types::Text,
                /// The destination that was used; empty: none was. Settled or cancelled by hand: the one it named.
                destination -> diesel::sql_types::Text,
                /// The destination that the message named; empty: routed by its topic.
                named_destination -> diesel::sql_types::Text,
                /// Its ordering key.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Its idempotency key; null: the caller gave none.
                idempotency_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// SHA-256 of topic and payload, where there is a key.
                digest -> diesel::sql_types::Nullable<diesel::sql_types::Binary>,
                /// The tenant that it belonged to.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// `delivered` or `dead`.
                status -> diesel::sql_types::Text,
                /// Why it died: a reason code.
                reason -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The same in words.
                error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Of the last answer.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// The beginning of the last answer.
                response -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Outcomes of sends.
                attempts -> diesel::sql_types::Integer,
                /// Where the ledger keeps payloads.
                payload -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// When it was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When it was settled.
                settled_at -> diesel::sql_types::Timestamptz,
            }
        }

        diesel::table! {
            /// The history: failed attempts, and what operators did. Without a primary key, as the ledger.
            $($of_attempt)+ (message_id, happened_at) {
                /// Which of the eight parts holds the entry, as of the ledger.
                part -> diesel::sql_types::SmallInt,
                /// Of the message.
                sequence -> diesel::sql_types::BigInt,
                /// What receivers saw.
                message_id -> diesel::sql_types::Uuid,
                /// Its topic.
                topic -> diesel::sql_types::Text,
                /// The destination that was used; empty: none was. Of `replayed`: the one that the new message names.
                destination -> diesel::sql_types::Text,
                /// The tenant that it belongs to.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// `failed`, `requeued`, `discarded` or `replayed`.
                event -> diesel::sql_types::Text,
                /// Which attempt failed: 1 is the first. Null: nothing was counted.
                attempt -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// Why: a reason code.
                reason -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The same in words.
                error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Of the answer.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// The beginning of the answer.
                response -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// From the beginning of the send to its end.
                took -> diesel::sql_types::Nullable<diesel::sql_types::Interval>,
                /// The relay that sent.
                relay -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Who did it and why, where a person did.
                operator -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When.
                happened_at -> diesel::sql_types::Timestamptz,
            }
        }

        diesel::table! {
            /// Dead letters, whole.
            $($of_dead)+ (sequence) {
                /// As it was in the outbox.
                sequence -> diesel::sql_types::BigInt,
                /// What receivers see.
                message_id -> diesel::sql_types::Uuid,
                /// Its topic.
                topic -> diesel::sql_types::Text,
                /// The destination that was used; empty: none was.
                destination -> diesel::sql_types::Text,
                /// The destination that the message named; empty: routed by its topic.
                named_destination -> diesel::sql_types::Text,
                /// JSON, byte for byte.
                payload -> diesel::sql_types::Json,
                /// A JSON object of texts.
                headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// Its ordering key.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Its idempotency key; null: the caller gave none.
                idempotency_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// SHA-256 of topic and payload, where there is a key; plain inserts gave none.
                digest -> diesel::sql_types::Nullable<diesel::sql_types::Binary>,
                /// The tenant that it belongs to.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// When it was due last.
                available_at -> diesel::sql_types::Timestamptz,
                /// Its end.
                expires_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When it was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Outcomes of sends.
                attempts -> diesel::sql_types::Integer,
                /// Why it died: a reason code.
                reason -> diesel::sql_types::Text,
                /// The same in words.
                last_error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Of the last answer.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// The beginning of the last answer.
                response -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When it died.
                died_at -> diesel::sql_types::Timestamptz,
                /// Of a part of a fan-out: the sequence of the whole.
                split_from -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// Whether it keeps its ordering key back.
                blocks_key -> diesel::sql_types::Bool,
            }
        }

        diesel::table! {
            /// Relays at work, and those that died not long ago.
            $($of_lease)+ (id) {
                /// The fencing token: `locked_by` of what is claimed under it.
                id -> diesel::sql_types::BigInt,
                /// Host and process.
                relay -> diesel::sql_types::Text,
                /// When the relay took it.
                started_at -> diesel::sql_types::Timestamptz,
                /// The last heartbeat.
                renewed_at -> diesel::sql_types::Timestamptz,
                /// Over then, unless it is renewed.
                expires_at -> diesel::sql_types::Timestamptz,
                /// Whether the relay works only while no older one does.
                single_active -> diesel::sql_types::Bool,
                /// Some relay has seen the lease expired: it never comes back.
                ended -> diesel::sql_types::Bool,
                /// The topics and destinations that the relay takes messages of; null: it takes none.
                serves -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// How soon it may end when the relay's session is gone; null: by time only.
                takeover_after -> diesel::sql_types::Nullable<diesel::sql_types::Interval>,
            }
        }

        diesel::table! {
            /// Destinations and topics whose messages wait.
            $($of_pause)+ (kind, name) {
                /// `destination` or `topic`.
                kind -> diesel::sql_types::Text,
                /// Which one.
                name -> diesel::sql_types::Text,
                /// Why.
                reason -> diesel::sql_types::Text,
                /// Since when.
                paused_at -> diesel::sql_types::Timestamptz,
                /// Null: until it is resumed.
                paused_until -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// How often in a row a circuit breaker has opened.
                openings -> diesel::sql_types::Integer,
            }
        }

        diesel::table! {
            /// Registered destinations: those that are rows, and not in the relay's settings.
            $($of_destination)+ (name) {
                /// Its name.
                name -> diesel::sql_types::Text,
                /// Where messages are posted.
                url -> diesel::sql_types::Text,
                /// Patterns of topics, as in routes.
                topics -> diesel::sql_types::Array<diesel::sql_types::Text>,
                /// Only messages of this tenant; null: of any.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// Only messages whose payload meets it; null: all.
                filter -> diesel::sql_types::Nullable<$crate::schema::Jsonpath>,
                /// `false`: nothing is sent there, and its messages wait.
                enabled -> diesel::sql_types::Bool,
                /// What signs requests: one or several, the newest first.
                secret -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// All but the newest sign no longer than this.
                old_secrets_until -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// A JSON object of headers for every request.
                headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// How requests look; null: as the relay's settings say.
                mode -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Sends at the same time; null: 4.
                concurrency -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// Requests in a time, of all relays together, such as `10/s`; null: no limit.
                rate -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The limit for one send; null: as the relay's settings say.
                timeout -> diesel::sql_types::Nullable<diesel::sql_types::Interval>,
                /// For people.
                description -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Why it is disabled.
                disabled_reason -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When it was registered.
                created_at -> diesel::sql_types::Timestamptz,
                /// When it was last changed; kept by the database.
                updated_at -> diesel::sql_types::Timestamptz,
            }
        }

        diesel::table! {
            /// The view of all messages with their status.
            $($of_messages)+ (sequence) {
                /// Given by the database, in the order of the inserts.
                sequence -> diesel::sql_types::BigInt,
                /// What receivers see.
                message_id -> diesel::sql_types::Uuid,
                /// Its topic.
                topic -> diesel::sql_types::Text,
                /// Of a live message the one that it names, empty: routed by its topic; of a settled one the one
                /// that was used.
                destination -> diesel::sql_types::Text,
                /// `pending`, `sending`, `retrying`, `delivered` or `dead`.
                status -> diesel::sql_types::Text,
                /// Its ordering key.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Its idempotency key; the message id where the caller gave none.
                idempotency_key -> diesel::sql_types::Text,
                /// The tenant that it belongs to.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// When it was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Not sent before; of a live or dead one.
                available_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Not sent after; of a live or dead one.
                expires_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Outcomes of sends.
                attempts -> diesel::sql_types::Integer,
                /// The lease that holds it.
                locked_by -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// Since when.
                locked_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the last attempt ended; null: none has.
                last_attempt_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Why the last attempt failed, or it died: a reason code.
                last_error_code -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The same in words.
                last_error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Of the last answer; of a settled one.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// When it was delivered, or died.
                settled_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
            }
        }

        $crate::__outbox_rows!($messages $dead $ledger);

        diesel::allow_tables_to_appear_in_same_query!(
            $outbox, $ledger, $attempt, $dead, $lease, $pause, $destination, $messages,
        );
    };
}
