//! `drbd.conf`: the option table, the configuration language and its model.
//!
//! Owns the text layout of the configuration file as specified in `config-and-cli.md`, sections 1
//! to 4 and 8. It parses strings and writes strings; reading files, asking for host names and
//! running tools belongs to its callers.

pub mod options;

pub mod dump;
pub mod dump_xml;
mod lex;
pub mod model;
pub mod parse;
pub mod resolve;

#[cfg(test)]
mod tests;
