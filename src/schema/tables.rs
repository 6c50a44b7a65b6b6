//! The tables that `outbox_tables!` declares, for all names. A test compares them with the database.

/// The only definition of the tables. The arguments are the names in SQL, then the names of the modules.
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
                (stringify!($destination), "_endpoint"),
                (stringify!($messages), "_messages"),
            ],
        );

        diesel::table! {
            /// Live messages: pending, sending, retrying.
            $($of_outbox)+ (sequence) {
                /// The position in the outbox. The database assigns it in the order of the inserts.
                sequence -> diesel::sql_types::BigInt,
                /// The message id. Receivers see it as the id of the event, and as `webhook-id`.
                message_id -> diesel::sql_types::Uuid,
                /// The topic, which routes match.
                topic -> diesel::sql_types::Text,
                /// The destination that the message names; empty: routed by topic.
                destination -> diesel::sql_types::Text,
                /// The payload as JSON, kept byte for byte.
                payload -> diesel::sql_types::Json,
                /// The headers, as a JSON object of texts.
                headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// The ordering key. Messages with the same key are delivered in order.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The idempotency key, unique together with the destination; null: the caller gave none.
                idempotency_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// SHA-256 of topic and payload, if there is a key. Plain inserts omit it.
                digest -> diesel::sql_types::Nullable<diesel::sql_types::Binary>,
                /// The tenant of the message.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// When the message becomes due.
                available_at -> diesel::sql_types::Timestamptz,
                /// When the message expires; null: never.
                expires_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the message was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// The number of attempts.
                attempts -> diesel::sql_types::Integer,
                /// The lease under which a relay has claimed the message. Only relays write the column.
                locked_by -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// When a relay claimed the message. Only relays write the column.
                locked_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the last attempt failed; null: no attempt has failed.
                last_attempt_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Why the last attempt failed: a reason code.
                last_error_code -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The reason in words.
                last_error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// For a part of a fan-out: the sequence of the original message.
                split_from -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// For a message that is being fanned out: the last destination, in byte order, that has its part.
                split_to -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The endpoint that the message is addressed to, by its `id`; null: by its name or topic.
                registration -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
            }
        }

        diesel::table! {
            /// The result of each message at each destination. Diesel requires a primary key, but the table has none:
            /// do not use `find`.
            $($of_ledger)+ (message_id, destination, settled_at) {
                /// The part (0 to 7) that contains the entry. Retention empties the eight parts in turn.
                part -> diesel::sql_types::SmallInt,
                /// The sequence of the settled message.
                sequence -> diesel::sql_types::BigInt,
                /// The message id, as receivers saw it.
                message_id -> diesel::sql_types::Uuid,
                /// The topic of the message.
                topic -> diesel::sql_types::Text,
                /// The destination that was used, or empty. For a message that was settled or cancelled by hand, the
                /// destination that the message named.
                destination -> diesel::sql_types::Text,
                /// The destination that the message named; empty: routed by topic.
                named_destination -> diesel::sql_types::Text,
                /// The ordering key of the message.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The idempotency key; null: the caller gave none.
                idempotency_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// SHA-256 of topic and payload, if there is a key.
                digest -> diesel::sql_types::Nullable<diesel::sql_types::Binary>,
                /// The tenant of the message.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// `delivered`, `no_subscriber` or `dead`.
                status -> diesel::sql_types::Text,
                /// Why the message was dead-lettered: a reason code.
                reason -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The reason in words.
                error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The status of the last response.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// The beginning of the last response.
                response -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The number of attempts.
                attempts -> diesel::sql_types::Integer,
                /// The payload, if the ledger keeps payloads.
                payload -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// The headers as a JSON object of texts, if the ledger keeps payloads.
                headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// When the message was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the message was settled.
                settled_at -> diesel::sql_types::Timestamptz,
                /// The sequence of the message that was fanned out; null: the message is no part.
                split_from -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// The endpoint that was used, by its `id`; null: none.
                registration -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
            }
        }

        diesel::table! {
            /// The history: failed attempts and actions of operators. The table has no primary key, like the ledger.
            $($of_attempt)+ (message_id, happened_at) {
                /// The part (0 to 7) that contains the entry, as in the ledger.
                part -> diesel::sql_types::SmallInt,
                /// The sequence of the message.
                sequence -> diesel::sql_types::BigInt,
                /// The message id, as receivers saw it.
                message_id -> diesel::sql_types::Uuid,
                /// The topic of the message.
                topic -> diesel::sql_types::Text,
                /// The destination that was used, or empty. For `replayed`: the destination that the new message names.
                destination -> diesel::sql_types::Text,
                /// The tenant of the message.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// `failed`, `retried`, `requeued`, `discarded` or `replayed`.
                event -> diesel::sql_types::Text,
                /// The number of the failed attempt, from 1; null: no attempt was counted.
                attempt -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// Why the attempt failed: a reason code.
                reason -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The reason in words.
                error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The status of the response.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// The beginning of the response.
                response -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The duration of the send.
                took -> diesel::sql_types::Nullable<diesel::sql_types::Interval>,
                /// The relay that sent the message.
                relay -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The operator and the reason, for an action of an operator.
                operator -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When the event happened.
                happened_at -> diesel::sql_types::Timestamptz,
            }
        }

        diesel::table! {
            /// Complete dead letters.
            $($of_dead)+ (sequence, message_id) {
                /// The sequence, as in the outbox.
                sequence -> diesel::sql_types::BigInt,
                /// The message id, as receivers see it.
                message_id -> diesel::sql_types::Uuid,
                /// The topic of the message.
                topic -> diesel::sql_types::Text,
                /// The destination that was used, or empty.
                destination -> diesel::sql_types::Text,
                /// The destination that the message named; empty: routed by topic.
                named_destination -> diesel::sql_types::Text,
                /// The payload as JSON, kept byte for byte.
                payload -> diesel::sql_types::Json,
                /// The headers, as a JSON object of texts.
                headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// The ordering key of the message.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The idempotency key; null: the caller gave none.
                idempotency_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// SHA-256 of topic and payload, if there is a key. Plain inserts omit it.
                digest -> diesel::sql_types::Nullable<diesel::sql_types::Binary>,
                /// The tenant of the message.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// When the message was last due.
                available_at -> diesel::sql_types::Timestamptz,
                /// When the message expires; null: never.
                expires_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the message was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// The number of attempts.
                attempts -> diesel::sql_types::Integer,
                /// Why the message was dead-lettered: a reason code.
                reason -> diesel::sql_types::Text,
                /// The reason in words.
                last_error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The status of the last response.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// The beginning of the last response.
                response -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When the message was dead-lettered.
                dead_lettered_at -> diesel::sql_types::Timestamptz,
                /// For a part of a fan-out: the sequence of the original message.
                split_from -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// For a message that is being fanned out: the last destination, in byte order, that has its part.
                split_to -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Whether the dead letter blocks its ordering key.
                blocks_key -> diesel::sql_types::Bool,
                /// The endpoint that was used, by its `id`; null: none.
                registration -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
            }
        }

        diesel::table! {
            /// The leases of running relays, and of relays that ended recently.
            $($of_lease)+ (id) {
                /// The id of the lease and fencing token: `locked_by` of the messages that are claimed under the lease.
                id -> diesel::sql_types::BigInt,
                /// The host and process of the relay.
                relay -> diesel::sql_types::Text,
                /// When the relay took the lease.
                started_at -> diesel::sql_types::Timestamptz,
                /// When the relay last renewed the lease.
                renewed_at -> diesel::sql_types::Timestamptz,
                /// When the lease expires, unless it is renewed.
                expires_at -> diesel::sql_types::Timestamptz,
                /// Whether the relay stands by while an older relay is active.
                single_active -> diesel::sql_types::Bool,
                /// Whether a relay has seen that the lease expired. An ended lease never becomes valid again.
                ended -> diesel::sql_types::Bool,
                /// The topics and destinations whose messages the relay takes; null: it takes no messages.
                serves -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// How soon after the end of the relay's session another relay may end the lease; null: only when the
                /// lease has expired.
                takeover_after -> diesel::sql_types::Nullable<diesel::sql_types::Interval>,
                /// The names of the endpoints that the relay does not serve because of its own settings, by
                /// reason; null: none.
                refuses -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// The server process of the relay's listener, which makes inserts notify while the relay sleeps.
                listener_pid -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// When that process started.
                listener_started -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// The settings that the relays of an outbox must agree on, by name; secret keys as fingerprints.
                settings -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
            }
        }

        diesel::table! {
            /// Paused destinations and topics, whose messages wait.
            $($of_pause)+ (kind, name, paused_by) {
                /// `destination` or `topic`.
                kind -> diesel::sql_types::Text,
                /// The name of the destination or topic.
                name -> diesel::sql_types::Text,
                /// Why the destination or topic is paused.
                reason -> diesel::sql_types::Text,
                /// When the pause began.
                paused_at -> diesel::sql_types::Timestamptz,
                /// When the pause ends; null: when it is resumed.
                paused_until -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// How many times in a row the circuit breaker has opened.
                openings -> diesel::sql_types::Integer,
                /// How long the pause lasts from the time at which its end was written, by whatever clock.
                lasts -> diesel::sql_types::Nullable<diesel::sql_types::Interval>,
                /// Whose pause it is: `owner`, `operator`, `relay` or `receiver`.
                paused_by -> diesel::sql_types::Text,
            }
        }

        diesel::table! {
            /// Endpoints, which are rows instead of settings of the relay.
            $($of_destination)+ (name) {
                /// The name of the endpoint.
                name -> diesel::sql_types::Text,
                /// `webhook`: messages are posted to the URL; or `feed`: they are read.
                kind -> diesel::sql_types::Text,
                /// The URL to which messages are posted.
                url -> diesel::sql_types::Text,
                /// Topic patterns, as in routes.
                topics -> diesel::sql_types::Array<diesel::sql_types::Text>,
                /// Only messages of this tenant; null: messages of any tenant.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// Only messages that match this filter, a JSON object; null: all messages.
                filter -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// `false`: nothing is sent, and messages wait.
                enabled -> diesel::sql_types::Bool,
                /// The secrets that sign requests, newest first.
                secret -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When all secrets except the newest stop signing.
                old_secrets_until -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// A JSON object of headers for every request.
                headers -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// Authentication that the receiver asks for, plain or encrypted; null: none.
                auth -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The mode of requests; null: the mode of the relay's settings.
                mode -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The maximum number of concurrent sends; null: 4.
                concurrency -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// The rate limit for requests of all relays together, such as `10/s`; null: no limit.
                rate -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The timeout of a send; null: the timeout of the relay's settings.
                timeout -> diesel::sql_types::Nullable<diesel::sql_types::Interval>,
                /// A JSON object of options without a column of their own, as in `outbox.toml`; null: the settings of the
                /// relay.
                policy -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
                /// A description for people.
                description -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Why the endpoint is disabled.
                disabled_reason -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When the endpoint was registered.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the endpoint was last changed. The database sets the column.
                updated_at -> diesel::sql_types::Timestamptz,
                /// The first failed send since the last successful one; null: the last send was successful. Of a feed that is
                /// failing: since when nobody has read it.
                failing_since -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// The reason of that failure.
                failing_reason -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// No send has succeeded for ten minutes since that failure. Of a feed: it has events, and nobody reads it.
                failing -> diesel::sql_types::Bool,
                /// How the endpoint shows that it wants the messages: `challenge` or `cloudevents`, each also with `:skip`;
                /// `none` or null: it need not.
                verification -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When the endpoint was verified. A change of the URL or the verification clears the column.
                verified_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// The rate limit that the endpoint asked for when it was verified.
                allowed_rate -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// When a relay tries to verify the endpoint next; null: now.
                verification_due -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// The failed tries.
                verification_tries -> diesel::sql_types::Integer,
                /// Why the last try failed: a reason code, a colon and the error.
                verification_error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// Tells this registration from others of the same name, and from the same row under another tenant.
                id -> diesel::sql_types::Uuid,
                /// Who has disabled the endpoint: `owner`, `operator`, `relay` or `receiver`; null: an operator.
                disabled_by -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// A JSON object: who has set a value, such as `{"filter": "operator"}`.
                set_by -> diesel::sql_types::Nullable<diesel::sql_types::Json>,
            }
        }

        diesel::table! {
            /// The view of all messages, with their status.
            $($of_messages)+ (sequence) {
                /// The position in the outbox. The database assigns it in the order of the inserts.
                sequence -> diesel::sql_types::BigInt,
                /// The message id, as receivers see it.
                message_id -> diesel::sql_types::Uuid,
                /// The topic of the message.
                topic -> diesel::sql_types::Text,
                /// For a live message, the destination that it names; empty: routed by topic. For a settled message, the
                /// destination that was used.
                destination -> diesel::sql_types::Text,
                /// `pending`, `sending`, `retrying`, `delivered` or `dead`.
                status -> diesel::sql_types::Text,
                /// The ordering key of the message.
                ordering_key -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The idempotency key; the message id if the caller gave none.
                idempotency_key -> diesel::sql_types::Text,
                /// The tenant of the message.
                tenant_id -> diesel::sql_types::Nullable<diesel::sql_types::Uuid>,
                /// When the message was enqueued.
                created_at -> diesel::sql_types::Timestamptz,
                /// When the event occurred; null: when it was enqueued.
                occurred_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the message is or was due; for a live or dead message.
                available_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the message expires; for a live or dead message.
                expires_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// The number of attempts.
                attempts -> diesel::sql_types::Integer,
                /// The lease under which a relay has claimed the message.
                locked_by -> diesel::sql_types::Nullable<diesel::sql_types::BigInt>,
                /// When a relay claimed the message.
                locked_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// When the last attempt ended; null: no attempt has ended.
                last_attempt_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
                /// Why the last attempt failed, or why the message was dead-lettered: a reason code.
                last_error_code -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The reason in words.
                last_error -> diesel::sql_types::Nullable<diesel::sql_types::Text>,
                /// The status of the last response, for a settled message.
                http_status -> diesel::sql_types::Nullable<diesel::sql_types::Integer>,
                /// When the message was delivered or dead-lettered.
                settled_at -> diesel::sql_types::Nullable<diesel::sql_types::Timestamptz>,
            }
        }

        $crate::__outbox_rows!($messages $dead $ledger);

        diesel::allow_tables_to_appear_in_same_query!(
            $outbox, $ledger, $attempt, $dead, $lease, $pause, $destination, $messages,
        );
    };
}
