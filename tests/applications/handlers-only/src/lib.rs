//! An application that handles its messages in its own process and needs no HTTP. See `tests/`.
