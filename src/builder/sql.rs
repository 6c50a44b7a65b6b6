//! SQL: what an assembled relay asks beside the engine.

#[cfg(feature = "operate")]
pub(super) mod jit;
#[cfg(not(feature = "endpoints"))]
pub(super) mod registered;
