//! An application that uses rustls itself, with its default features, alongside diesel-outbox. See `tests/`.
