//! Placeholder of the crate's root; its modules follow.
