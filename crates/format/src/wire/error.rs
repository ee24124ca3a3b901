//! Why bytes of a peer are no packet.

use super::command::Command;

/// A peer broke the protocol. Every variant means: drop this connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The header begins with bytes that are no header of the agreed version.
    #[error("header begins with {found:#010x}, which is no header of protocol {protocol}")]
    Magic {
        /// First four bytes.
        found: u32,
        /// Agreed version, 0 if there is none yet.
        protocol: u32,
    },
    /// The pad of a 16-byte header is not zero.
    #[error("pad of the header of command {command:#06x} is {found:#x} instead of 0")]
    HeaderPad {
        /// Command number.
        command: u16,
        /// The pad.
        found: u32,
    },
    /// No such command.
    #[error("unknown command {command:#06x} with {len} payload bytes")]
    UnknownCommand {
        /// Command number.
        command: u16,
        /// Length in the header.
        len: u32,
    },
    /// The command does not travel on this stream.
    #[error("{} on the wrong stream", command.name())]
    WrongStream {
        /// The command.
        command: Command,
    },
    /// The command needs a newer version or a feature that was not agreed.
    #[error("{} does not belong to protocol {protocol} with features {features:#x}",
            command.name())]
    NotInDialect {
        /// The command.
        command: Command,
        /// Agreed version, 0 if there is none yet.
        protocol: u32,
        /// Agreed features.
        features: u32,
    },
    /// The length in the header is not possible for the command.
    #[error("{} with {len} payload bytes; {min}..={max} are possible", command.name())]
    Length {
        /// The command.
        command: Command,
        /// Length in the header.
        len: u32,
        /// Smallest possible length.
        min: u32,
        /// Largest possible length.
        max: u32,
    },
    /// The length is in bounds but cuts a unit, such as a sector or a word.
    #[error("{} with {len} payload bytes is not made of whole units of {unit} bytes",
            command.name())]
    Granularity {
        /// The command.
        command: Command,
        /// Length in the header.
        len: u32,
        /// Bytes of a unit.
        unit: u32,
    },
    /// A field holds a value without meaning.
    #[error("{}: field {field} is {value:#x}", command.name())]
    Field {
        /// The command.
        command: Command,
        /// The field's name.
        field: &'static str,
        /// What was found.
        value: u64,
    },
    /// The caller gave fewer bytes than `Header::fixed_len` asks for.
    #[error("{}: {have} bytes were given for decoding, {need} are needed", command.name())]
    ShortBody {
        /// The command.
        command: Command,
        /// Bytes given.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
}
