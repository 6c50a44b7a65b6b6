//! An application that speaks TLS by itself, with rustls as it comes, and has diesel-outbox besides. See `tests/`.
