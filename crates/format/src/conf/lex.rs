//! Splits configuration text into tokens, each with its line.

use alloc::string::String;

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One of `{ } ; [ ] :`.
    Operator(char),
    /// Letters, digits, `/`, `.`, `_`, `-`, without quotes.
    Word,
    /// Text in double quotes; the quotes and escapes are removed.
    Quoted,
    /// A character that starts no token.
    Stray(char),
    /// A word or quoted text that breaks a rule of the language; the text says which.
    Broken(&'static str),
    /// End of the file.
    End,
}

/// One token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    /// Text as the parser uses it.
    pub(super) text: String,
    /// Line, counted from 1.
    pub(super) line: u32,
}

impl Token {
    /// Whether this is the operator `wanted`.
    pub(super) fn is(&self, wanted: char) -> bool {
        self.kind == Kind::Operator(wanted)
    }

    /// Whether this is a word or quoted text.
    pub(super) fn is_text(&self) -> bool {
        matches!(self.kind, Kind::Word | Kind::Quoted)
    }

    /// Whether this is the unquoted word `wanted`.
    pub(super) fn is_word(&self, wanted: &str) -> bool {
        self.kind == Kind::Word && self.text == wanted
    }
}

/// Position in one file's text.
#[derive(Debug)]
pub(super) struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Lexer {
            text,
            at: 0,
            line: 1,
        }
    }

    /// The next token. After the end it is always [`Kind::End`].
    pub(super) fn next(&mut self) -> Token {
        self.skip_blank();
        let line = self.line;
        let Some(first) = self.rest().chars().next() else {
            return Token {
                kind: Kind::End,
                text: String::new(),
                line,
            };
        };
        if first == '"' {
            return self.quoted();
        }
        if is_word(first) {
            return self.word();
        }
        self.at += first.len_utf8();
        let kind = match first {
            '{' | '}' | ';' | '[' | ']' | ':' => Kind::Operator(first),
            _ => Kind::Stray(first),
        };
        Token {
            kind,
            text: String::from(first),
            line,
        }
    }

    /// Everything up to a `]` on the same line, for IPv6 addresses, which contain operators.
    pub(super) fn until_bracket(&mut self) -> Token {
        self.skip_blank();
        let rest = self.rest();
        let end = rest
            .find([']', '\n'])
            .unwrap_or(rest.len())
            .min(LONGEST_WORD_BYTES);
        let end = (0..=end)
            .rev()
            .find(|&end| rest.is_char_boundary(end))
            .unwrap_or(0);
        let text = String::from(rest[..end].trim_end());
        self.at += end;
        Token {
            kind: Kind::Word,
            text,
            line: self.line,
        }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_blank(&mut self) {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            match byte {
                b'\n' => self.line = self.line.saturating_add(1),
                b' ' | b'\t' | b'\r' => {}
                b'#' => {
                    while bytes.get(self.at + 1).is_some_and(|&next| next != b'\n') {
                        self.at += 1;
                    }
                }
                _ => return,
            }
            self.at += 1;
        }
    }

    fn word(&mut self) -> Token {
        let rest = self.rest();
        let len = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        self.at += len;
        let kind = if len > LONGEST_WORD_BYTES {
            Kind::Broken("Token too long")
        } else {
            Kind::Word
        };
        Token {
            kind,
            text: String::from(&rest[..len.min(LONGEST_WORD_BYTES)]),
            line: self.line,
        }
    }

    fn quoted(&mut self) -> Token {
        let line = self.line;
        let mut text = String::new();
        let mut chars = self.rest().char_indices().skip(1);
        let mut kind = Kind::Broken("Unterminated double quoted string");
        let mut len = self.rest().len();
        let mut content_bytes = 0;
        while let Some((index, c)) = chars.next() {
            let c = match c {
                '"' => {
                    kind = Kind::Quoted;
                    len = index + 1;
                    break;
                }
                '\n' => {
                    len = index;
                    break;
                }
                '\\' => match chars.next() {
                    None | Some((_, '\n')) => break,
                    Some((_, escaped)) => {
                        content_bytes += 1;
                        escaped
                    }
                },
                other => other,
            };
            content_bytes += c.len_utf8();
            if content_bytes > LONGEST_QUOTED_BYTES {
                kind = Kind::Broken("Double quoted string too long");
                break;
            }
            text.push(c);
        }
        self.at += len;
        Token { kind, text, line }
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-')
}

/// Whether a text must be quoted to be read back as one token.
pub(super) fn needs_quotes(text: &str) -> bool {
    text.is_empty() || text.len() > LONGEST_BARE_BYTES || !text.chars().all(is_word)
}

/// Longest word without quotes.
const LONGEST_WORD_BYTES: usize = 128;
/// Longest text between quotes, escapes included.
const LONGEST_QUOTED_BYTES: usize = 255;
/// Longest text that is written without quotes.
const LONGEST_BARE_BYTES: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn kinds(text: &str) -> Vec<(Kind, String, u32)> {
        let mut lexer = Lexer::new(text);
        let mut found = Vec::new();
        loop {
            let token = lexer.next();
            if token.kind == Kind::End {
                return found;
            }
            found.push((token.kind, token.text, token.line));
        }
    }

    #[test]
    fn comments_and_lines_are_counted() {
        let found = kinds("a # x { \"\n\n b;# end");
        assert_eq!(found.len(), 3);
        assert_eq!(found[1], (Kind::Word, "b".into(), 3));
        assert_eq!(found[2].0, Kind::Operator(';'));
    }

    #[test]
    fn backslash_takes_the_next_character() {
        assert_eq!(
            kinds(r#""a\"b\\c\n""#),
            [(Kind::Quoted, r#"a"b\cn"#.into(), 1)]
        );
    }

    #[test]
    fn broken_texts_are_named() {
        let broken = |text: &str| kinds(text)[0].0.clone();
        assert_eq!(
            broken("\"abc\n\""),
            Kind::Broken("Unterminated double quoted string")
        );
        assert_eq!(
            broken("\"abc"),
            Kind::Broken("Unterminated double quoted string")
        );
        assert_eq!(
            broken("\"abc\\"),
            Kind::Broken("Unterminated double quoted string")
        );
        let long = alloc::format!("\"{}\"", "x".repeat(256));
        assert_eq!(broken(&long), Kind::Broken("Double quoted string too long"));
        assert_eq!(broken(&"x".repeat(129)), Kind::Broken("Token too long"));
        assert_eq!(broken(&"x".repeat(128)), Kind::Word);
        assert_eq!(broken("*"), Kind::Stray('*'));
    }
}
