//! An application whose messages are worked on in its own process, so that it needs no HTTP. See `tests/`.
