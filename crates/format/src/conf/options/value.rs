//! Values of options: parsing with units and ranges, and their text forms.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;

use super::{Case, Kind, OutOfRange, Scale, Symbol};

/// A checked value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionValue {
    /// A number in the storage unit of its option ([`Scale`]).
    Number {
        /// The stored number.
        number: i64,
        /// Its unit.
        scale: Scale,
    },
    /// Yes or no; also the value of flags.
    Bool(bool),
    /// A word of an enumeration.
    Symbol(Symbol),
    /// Free text or the description of a key.
    Text(String),
}

impl OptionValue {
    /// The stored number of a number, the code of a symbol, 0 or 1 of a boolean; none for text.
    pub fn number(&self) -> Option<i64> {
        match self {
            OptionValue::Number { number, .. } => Some(*number),
            OptionValue::Bool(yes) => Some(i64::from(*yes)),
            OptionValue::Symbol(symbol) => Some(i64::from(symbol.code)),
            OptionValue::Text(_) => None,
        }
    }

    /// The form that `drbdsetup show` prints: numbers with their scale letter, text in quotes.
    pub fn show(&self) -> String {
        match self {
            OptionValue::Text(text) => quoted(text),
            _ => self.to_string(),
        }
    }
}

/// The form behind `--name=`: like `show`, but text without quotes.
impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionValue::Number { number, scale } => write!(f, "{number}{}", scale.suffix()),
            OptionValue::Bool(true) => f.write_str("yes"),
            OptionValue::Bool(false) => f.write_str("no"),
            OptionValue::Symbol(symbol) => f.write_str(symbol.name),
            OptionValue::Text(text) => f.write_str(text),
        }
    }
}

/// Why a value is refused. The texts complete the sentence "Value is ...".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// None of the words of an enumeration.
    #[error("not valid")]
    NotAllowed {
        /// The words that are.
        symbols: &'static [Symbol],
    },
    /// A boolean that is neither.
    #[error("not 'yes' or 'no'")]
    NotYesNo,
    /// No digits, trailing characters, an unknown suffix.
    #[error("not a number")]
    NotANumber,
    /// Below the range.
    #[error("too small")]
    TooSmall,
    /// Above the range, or beyond 64 bits.
    #[error("too big")]
    TooBig,
    /// Text longer than it can be stored.
    #[error("too long")]
    TooLong {
        /// Longest text in bytes.
        max_len_bytes: usize,
    },
}

/// Checks `text` against a type.
pub(super) fn parse(kind: &Kind, text: &str) -> Result<OptionValue, ValueError> {
    match *kind {
        Kind::Number {
            scale,
            min,
            max,
            out_of_range,
            ..
        } => {
            let number = number(text, scale)?;
            let number = match out_of_range {
                OutOfRange::Clamp => number.clamp(min, max),
                OutOfRange::Refuse => in_range(number, min, max)?,
            };
            Ok(OptionValue::Number { number, scale })
        }
        Kind::Bool { .. } | Kind::Flag => match text {
            "yes" => Ok(OptionValue::Bool(true)),
            "no" => Ok(OptionValue::Bool(false)),
            _ => Err(ValueError::NotYesNo),
        },
        Kind::Enum { symbols, case, .. } => match symbol(symbols, text, case) {
            Some(symbol) => Ok(OptionValue::Symbol(symbol)),
            None => Err(ValueError::NotAllowed { symbols }),
        },
        Kind::NumberOrSymbol {
            min, max, symbols, ..
        } => {
            if let Some(symbol) = symbol(symbols, text, Case::Sensitive) {
                return Ok(OptionValue::Symbol(symbol));
            }
            match number(text, Scale::One) {
                Ok(number) => {
                    let number = in_range(number, min, max)?;
                    Ok(OptionValue::Number {
                        number,
                        scale: Scale::One,
                    })
                }
                Err(_) => Err(ValueError::NotAllowed { symbols }),
            }
        }
        Kind::Text { max_len_bytes } => bounded(text, max_len_bytes),
        Kind::Key { .. } => bounded(text, LONGEST_KEY_BYTES),
    }
}

/// The value of an option that is not given.
pub(super) fn default(kind: &Kind) -> OptionValue {
    match *kind {
        Kind::Number { default, scale, .. } => OptionValue::Number {
            number: default,
            scale,
        },
        Kind::Bool { default } => OptionValue::Bool(default),
        Kind::Flag => OptionValue::Bool(false),
        Kind::Enum {
            symbols, default, ..
        }
        | Kind::NumberOrSymbol {
            symbols, default, ..
        } => {
            let symbol = symbol(symbols, default, Case::Sensitive);
            OptionValue::Symbol(symbol.expect("a test holds each default against its symbols"))
        }
        Kind::Text { .. } | Kind::Key { .. } => OptionValue::Text(String::new()),
    }
}

/// Describes what is allowed, for error messages.
pub(super) fn allowed(kind: &Kind) -> String {
    match *kind {
        Kind::Number {
            scale,
            min,
            max,
            default,
            unit,
            ..
        } => {
            let suffix = scale.suffix();
            let unit = if unit.is_empty() {
                String::new()
            } else {
                format!(" ({unit})")
            };
            format!("{min}{suffix}..{max}{suffix}{unit}, default {default}{suffix}")
        }
        Kind::Bool { default: true } => "yes (default) or no".to_owned(),
        Kind::Bool { default: false } | Kind::Flag => "yes or no (default)".to_owned(),
        Kind::Enum {
            symbols, default, ..
        } => {
            format!("{}, default {default}", joined(symbols, " | "))
        }
        Kind::NumberOrSymbol {
            min,
            max,
            symbols,
            default,
        } => {
            format!(
                "{} or {min}..{max}, default {default}",
                joined(symbols, " | ")
            )
        }
        Kind::Text { max_len_bytes } => format!("text of at most {max_len_bytes} bytes"),
        Kind::Key { key_type } => format!("description of a key of type {key_type}"),
    }
}

/// The words of an enumeration with a separator between them.
pub(super) fn joined(symbols: &[Symbol], separator: &str) -> String {
    let mut text = String::new();
    for (index, symbol) in symbols.iter().enumerate() {
        if index > 0 {
            text.push_str(separator);
        }
        text.push_str(symbol.name);
    }
    text
}

impl ValueError {
    /// The allowed words of an enumeration as the original lists them: `A | B | C`.
    pub fn allowed_words(&self) -> Option<String> {
        match self {
            ValueError::NotAllowed { symbols } => Some(joined(symbols, " | ")),
            _ => None,
        }
    }
}

/// Decimal digits with an optional suffix, converted into `scale` and rounded up.
fn number(text: &str, scale: Scale) -> Result<i64, ValueError> {
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let split = text
        .bytes()
        .position(|byte| !byte.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, suffix) = text.split_at(split);
    let too_long = || {
        if negative {
            ValueError::TooSmall
        } else {
            ValueError::TooBig
        }
    };
    let plain: u64 = match digits.parse() {
        Ok(number) => number,
        Err(_) if digits.is_empty() => return Err(ValueError::NotANumber),
        Err(_) => return Err(too_long()),
    };
    let stored = match suffix {
        "" => plain,
        "K" | "k" => convert(plain, 1 << 10, scale)?,
        "M" | "m" => convert(plain, 1 << 20, scale)?,
        "G" | "g" => convert(plain, 1 << 30, scale)?,
        "s" => convert(plain, 512, scale)?,
        _ => return Err(ValueError::NotANumber),
    };
    let stored = i64::try_from(stored).map_err(|_| too_long())?;
    Ok(if negative { -stored } else { stored })
}

/// Multiplies by a suffix and divides by the storage unit, rounding up.
fn convert(plain: u64, multiplier: u64, scale: Scale) -> Result<u64, ValueError> {
    let bytes = plain.checked_mul(multiplier).ok_or(ValueError::TooBig)?;
    Ok(bytes.div_ceil(scale.factor()))
}

fn in_range(number: i64, min: i64, max: i64) -> Result<i64, ValueError> {
    if number < min {
        Err(ValueError::TooSmall)
    } else if number > max {
        Err(ValueError::TooBig)
    } else {
        Ok(number)
    }
}

fn symbol(symbols: &[Symbol], text: &str, case: Case) -> Option<Symbol> {
    let same = |symbol: &&Symbol| match case {
        Case::Sensitive => symbol.name == text,
        Case::Ignored => symbol.name.eq_ignore_ascii_case(text),
    };
    symbols.iter().find(same).copied()
}

fn bounded(text: &str, max_len_bytes: usize) -> Result<OptionValue, ValueError> {
    if text.len() > max_len_bytes {
        return Err(ValueError::TooLong { max_len_bytes });
    }
    Ok(OptionValue::Text(text.to_owned()))
}

/// Text in double quotes with `"` and `\` escaped.
pub(in crate::conf) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        if c == '"' || c == '\\' {
            out.push('\\');
        }
        out.push(c);
    }
    out.push('"');
    out
}

/// Longest description of a key in bytes.
const LONGEST_KEY_BYTES: usize = 127;
