//! The NBD handshake as a state machine without IO: bytes of the client in, bytes for the client
//! and questions to the server out.
//!
//! Fixed newstyle only. Every option of the protocol document is known; TLS is refused. A client
//! that breaks the framing is disconnected, one that asks for something odd gets an error reply.

use super::proto::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, HeaderStyle, MAGIC,
    OPTION_MAGIC, OPTION_REPLY_MAGIC, be16, be32, be64, info, option, option_reply,
};

/// Longest option that is read, in bytes. Longer ones are skipped and refused.
const MAX_OPTION_LEN: u32 = 16 << 10;
/// Longest name of an export in bytes, the protocol's own limit.
const MAX_NAME_LEN: usize = 4096;
/// An option longer than this ends the connection instead of being skipped.
const MAX_SKIP_LEN: u32 = 1 << 20;
/// Most options one client may send before it must start or leave.
const MAX_OPTIONS: u32 = 1024;
/// Smallest block that a client must be able to use unasked.
const DEFAULT_MIN_BLOCK_BYTES: u32 = 512;

/// What a client is told of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExportInfo {
    /// Size in bytes.
    pub(crate) size_bytes: u64,
    /// `export_flag` bits.
    pub(crate) flags: u16,
    /// Smallest request in bytes.
    pub(crate) min_block_bytes: u32,
    /// Best request in bytes.
    pub(crate) preferred_block_bytes: u32,
    /// Largest request in bytes.
    pub(crate) max_block_bytes: u32,
    /// For people.
    pub(crate) description: String,
}

/// Why an export cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// There is no such export.
    Unknown(String),
    /// It exists, but not now or not for this client.
    Policy(String),
    /// The server is going down.
    Shutdown,
}

/// What the client wants with an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Only to know about it.
    Info,
    /// To use it.
    Go,
    /// To use it, by the old option that cannot be refused politely.
    ExportName,
}

/// A client's question about an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lookup {
    /// The name; empty for the default export.
    pub(crate) name: String,
    /// What for.
    pub(crate) purpose: Purpose,
    wants_name: bool,
    wants_description: bool,
    knows_block_size: bool,
}

/// What the handshake came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Negotiated {
    /// Form of requests and replies.
    pub(crate) style: HeaderStyle,
    /// `base:allocation` may be asked for.
    pub(crate) base_allocation: bool,
}

/// What the caller must do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Feed more bytes.
    NeedBytes,
    /// Look the export up (and for `Go` and `ExportName` open it), then call `answer`.
    Lookup(Lookup),
    /// Call `answer_list`.
    List,
    /// Send what is queued, then close.
    Close,
}

/// The state of one connection's handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    state: State,
    zeroes: bool,
    style: HeaderStyle,
    /// The export for which contexts were chosen, and whether `base:allocation` is among them.
    contexts: Option<(String, bool)>,
    options_seen: u32,
    pub(crate) out: Vec<u8>,
}

#[derive(Debug)]
enum State {
    ClientFlags,
    Option,
    Skip { option: u32, left: u32 },
    Waiting(Option<Lookup>),
    Closed,
}

impl Handshake {
    /// A new connection; the greeting is already in `out`.
    pub(crate) fn new() -> Handshake {
        let mut out = Vec::with_capacity(256);
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        out.extend_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
        Handshake {
            state: State::ClientFlags,
            zeroes: true,
            style: HeaderStyle::Simple,
            contexts: None,
            options_seen: 0,
            out,
        }
    }

    /// Takes bytes; returns how many it used. While a question is unanswered it uses none.
    pub(crate) fn step(&mut self, input: &[u8]) -> (usize, Step) {
        match &mut self.state {
            State::ClientFlags => self.client_flags(input),
            State::Option => self.option(input),
            State::Skip { option, left } => {
                let skipped = (*left as usize).min(input.len());
                *left -= skipped as u32;
                if *left == 0 {
                    let option = *option;
                    self.state = State::Option;
                    self.refuse(option, option_reply::ERR_TOO_BIG, "the option is too long");
                }
                (skipped, Step::NeedBytes)
            }
            State::Waiting(_) => (0, Step::NeedBytes),
            State::Closed => (0, Step::Close),
        }
    }

    /// Answers `Step::Lookup`. `Some` means that the transmission phase begins.
    pub(crate) fn answer(&mut self, found: Result<ExportInfo, Refused>) -> Option<Negotiated> {
        let State::Waiting(lookup) = &mut self.state else {
            return None;
        };
        let lookup = lookup.take()?;
        self.state = State::Option;
        if lookup.purpose == Purpose::ExportName {
            return self.answer_export_name(&lookup, found);
        }
        let option = match lookup.purpose {
            Purpose::Info => option::INFO,
            Purpose::Go | Purpose::ExportName => option::GO,
        };
        let export = match found {
            Ok(export) => export,
            Err(refused) => {
                let (kind, text) = match refused {
                    Refused::Unknown(text) => (option_reply::ERR_UNKNOWN, text),
                    Refused::Policy(text) => (option_reply::ERR_POLICY, text),
                    Refused::Shutdown => (
                        option_reply::ERR_SHUTDOWN,
                        "the server is shutting down".into(),
                    ),
                };
                self.refuse(option, kind, &text);
                return None;
            }
        };
        if needs_block_size(&export) && !lookup.knows_block_size {
            let text = format!(
                "the volume needs requests in multiples of {} bytes; \
                 use a client that asks for block sizes",
                export.min_block_bytes
            );
            self.refuse(option, option_reply::ERR_BLOCK_SIZE_REQD, &text);
            return None;
        }
        self.send_export(option, &lookup, &export);
        self.reply(option, option_reply::ACK, &[]);
        (lookup.purpose == Purpose::Go).then(|| self.negotiated(&lookup.name))
    }

    /// Whether `answer` would refuse this export for its block size. The caller asks before it
    /// opens the volume for the client.
    pub(crate) fn refuses_block_size(lookup: &Lookup, export: &ExportInfo) -> bool {
        lookup.purpose != Purpose::ExportName
            && needs_block_size(export)
            && !lookup.knows_block_size
    }

    /// Answers `Step::List`.
    pub(crate) fn answer_list(&mut self, names: &[String]) {
        if !matches!(self.state, State::Waiting(None)) {
            return;
        }
        self.state = State::Option;
        for name in names {
            let mut body = Vec::with_capacity(4 + name.len());
            put_string(&mut body, name.as_bytes());
            self.reply(option::LIST, option_reply::SERVER, &body);
        }
        self.reply(option::LIST, option_reply::ACK, &[]);
    }

    fn client_flags(&mut self, input: &[u8]) -> (usize, Step) {
        let Some(flags) = be32(input, 0) else {
            return (0, Step::NeedBytes);
        };
        let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
        // A client without fixed newstyle could not understand an error reply.
        if flags & !known != 0 || flags & u32::from(FLAG_FIXED_NEWSTYLE) == 0 {
            return self.close(4);
        }
        self.zeroes = flags & u32::from(FLAG_NO_ZEROES) == 0;
        self.state = State::Option;
        (4, Step::NeedBytes)
    }

    fn option(&mut self, input: &[u8]) -> (usize, Step) {
        let (Some(magic), Some(number), Some(len)) =
            (be64(input, 0), be32(input, 8), be32(input, 12))
        else {
            return (0, Step::NeedBytes);
        };
        self.options_seen += 1;
        if magic != OPTION_MAGIC || len > MAX_SKIP_LEN || self.options_seen > MAX_OPTIONS {
            return self.close(16);
        }
        if len > MAX_OPTION_LEN {
            self.state = State::Skip {
                option: number,
                left: len,
            };
            return (16, Step::NeedBytes);
        }
        let end = 16 + len as usize;
        let Some(data) = input.get(16..end) else {
            self.options_seen -= 1;
            return (0, Step::NeedBytes);
        };
        (end, self.run_option(number, data))
    }

    fn run_option(&mut self, number: u32, data: &[u8]) -> Step {
        match number {
            option::EXPORT_NAME => match name_of(data) {
                Some(name) => self.ask(Lookup {
                    name,
                    purpose: Purpose::ExportName,
                    wants_name: false,
                    wants_description: false,
                    knows_block_size: false,
                }),
                None => self.close(0).1,
            },
            option::ABORT => {
                self.reply(number, option_reply::ACK, &[]);
                self.close(0).1
            }
            option::LIST if data.is_empty() => {
                self.state = State::Waiting(None);
                Step::List
            }
            option::INFO | option::GO => match parse_lookup(number, data) {
                Some(lookup) => self.ask(lookup),
                None => self.invalid(number, "malformed name or list of information"),
            },
            option::STRUCTURED_REPLY if data.is_empty() => {
                if self.style == HeaderStyle::Extended {
                    let text = "extended headers are already agreed on";
                    self.refuse(number, option_reply::ERR_EXT_HEADER_REQD, text);
                } else {
                    self.style = HeaderStyle::Structured;
                    self.reply(number, option_reply::ACK, &[]);
                }
                Step::NeedBytes
            }
            option::EXTENDED_HEADERS if data.is_empty() => {
                self.style = HeaderStyle::Extended;
                self.reply(number, option_reply::ACK, &[]);
                Step::NeedBytes
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(number, data),
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                self.invalid(number, "this option takes no data")
            }
            option::STARTTLS => {
                let text = "TLS is not supported; use a unix socket or a tunnel";
                self.refuse(number, option_reply::ERR_POLICY, text);
                Step::NeedBytes
            }
            _ => {
                self.refuse(number, option_reply::ERR_UNSUP, "unknown option");
                Step::NeedBytes
            }
        }
    }

    fn contexts(&mut self, number: u32, data: &[u8]) -> Step {
        let set = number == option::SET_META_CONTEXT;
        if set {
            self.contexts = None;
        }
        if self.style == HeaderStyle::Simple {
            return self.invalid(number, "structured replies must be agreed on first");
        }
        let Some((name, queries)) = parse_contexts(data) else {
            return self.invalid(number, "malformed name or list of contexts");
        };
        let listed = |query: &[u8]| query == BASE_ALLOCATION || (!set && query == b"base:");
        // An empty list asks for everything in LIST, and for nothing in SET.
        let base = (!set && queries.is_empty()) || queries.iter().any(|query| listed(query));
        if base {
            let mut body = BASE_ALLOCATION_ID.to_be_bytes().to_vec();
            body.extend_from_slice(BASE_ALLOCATION);
            self.reply(number, option_reply::META_CONTEXT, &body);
        }
        self.reply(number, option_reply::ACK, &[]);
        if set {
            self.contexts = Some((name, base));
        }
        Step::NeedBytes
    }

    fn ask(&mut self, lookup: Lookup) -> Step {
        self.state = State::Waiting(Some(lookup.clone()));
        Step::Lookup(lookup)
    }

    fn answer_export_name(
        &mut self,
        lookup: &Lookup,
        found: Result<ExportInfo, Refused>,
    ) -> Option<Negotiated> {
        // The option has no error reply: closing is the only refusal.
        let Ok(export) = found else {
            self.state = State::Closed;
            return None;
        };
        self.out.extend_from_slice(&export.size_bytes.to_be_bytes());
        self.out.extend_from_slice(&export.flags.to_be_bytes());
        if self.zeroes {
            self.out.extend_from_slice(&[0; 124]);
        }
        Some(self.negotiated(&lookup.name))
    }

    fn negotiated(&self, name: &str) -> Negotiated {
        let base_allocation = matches!(&self.contexts, Some((of, true)) if of == name);
        Negotiated {
            style: self.style,
            base_allocation,
        }
    }

    fn send_export(&mut self, option: u32, lookup: &Lookup, export: &ExportInfo) {
        let mut body = info::EXPORT.to_be_bytes().to_vec();
        body.extend_from_slice(&export.size_bytes.to_be_bytes());
        body.extend_from_slice(&export.flags.to_be_bytes());
        self.reply(option, option_reply::INFO, &body);

        body.clear();
        body.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        for size in [
            export.min_block_bytes,
            export.preferred_block_bytes,
            export.max_block_bytes,
        ] {
            body.extend_from_slice(&size.to_be_bytes());
        }
        self.reply(option, option_reply::INFO, &body);

        let texts = [
            (lookup.wants_name, info::NAME, lookup.name.as_str()),
            (
                lookup.wants_description,
                info::DESCRIPTION,
                export.description.as_str(),
            ),
        ];
        for (_, kind, text) in texts.into_iter().filter(|(wanted, _, _)| *wanted) {
            body.clear();
            body.extend_from_slice(&kind.to_be_bytes());
            body.extend_from_slice(text.as_bytes());
            self.reply(option, option_reply::INFO, &body);
        }
    }

    fn invalid(&mut self, option: u32, text: &str) -> Step {
        self.refuse(option, option_reply::ERR_INVALID, text);
        Step::NeedBytes
    }

    fn refuse(&mut self, option: u32, kind: u32, text: &str) {
        self.reply(option, kind, text.as_bytes());
    }

    fn reply(&mut self, option: u32, kind: u32, body: &[u8]) {
        let len = u32::try_from(body.len()).expect("replies are short");
        self.out
            .extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&option.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&len.to_be_bytes());
        self.out.extend_from_slice(body);
    }

    fn close(&mut self, used: usize) -> (usize, Step) {
        self.state = State::Closed;
        (used, Step::Close)
    }
}

fn needs_block_size(export: &ExportInfo) -> bool {
    export.min_block_bytes > DEFAULT_MIN_BLOCK_BYTES
}

fn put_string(body: &mut Vec<u8>, text: &[u8]) {
    let len = u32::try_from(text.len()).expect("names are short");
    body.extend_from_slice(&len.to_be_bytes());
    body.extend_from_slice(text);
}

fn name_of(bytes: &[u8]) -> Option<String> {
    if bytes.len() > MAX_NAME_LEN {
        return None;
    }
    String::from_utf8(bytes.to_vec()).ok()
}

/// A length-prefixed string at the start of `data`, and what follows it.
fn take_string(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let len = be32(data, 0)? as usize;
    let rest = data.get(4..)?;
    (len <= rest.len()).then(|| rest.split_at(len))
}

fn parse_lookup(number: u32, data: &[u8]) -> Option<Lookup> {
    let (name, rest) = take_string(data)?;
    let count = usize::from(be16(rest, 0)?);
    let kinds = rest.get(2..)?;
    if kinds.len() != 2 * count {
        return None;
    }
    let wants = |kind: u16| (0..count).any(|at| be16(kinds, 2 * at) == Some(kind));
    Some(Lookup {
        name: name_of(name)?,
        purpose: if number == option::GO {
            Purpose::Go
        } else {
            Purpose::Info
        },
        wants_name: wants(info::NAME),
        wants_description: wants(info::DESCRIPTION),
        knows_block_size: wants(info::BLOCK_SIZE),
    })
}

fn parse_contexts(data: &[u8]) -> Option<(String, Vec<&[u8]>)> {
    let (name, rest) = take_string(data)?;
    let count = be32(rest, 0)?;
    let mut rest = rest.get(4..)?;
    let mut queries = Vec::new();
    for _ in 0..count {
        let (query, after) = take_string(rest)?;
        queries.push(query);
        rest = after;
    }
    rest.is_empty().then_some((name_of(name)?, queries))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export() -> ExportInfo {
        ExportInfo {
            size_bytes: 1 << 20,
            flags: 0x55,
            min_block_bytes: 512,
            preferred_block_bytes: 4096,
            max_block_bytes: 1 << 25,
            description: "d".into(),
        }
    }

    fn opt(number: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn go(name: &str, kinds: &[u16]) -> Vec<u8> {
        let mut data = Vec::new();
        put_string(&mut data, name.as_bytes());
        data.extend_from_slice(&(kinds.len() as u16).to_be_bytes());
        for kind in kinds {
            data.extend_from_slice(&kind.to_be_bytes());
        }
        data
    }

    fn started() -> Handshake {
        let mut handshake = Handshake::new();
        assert_eq!(
            handshake.step(&3u32.to_be_bytes()),
            (4, Step::NeedBytes),
            "both client flags are known"
        );
        handshake.out.clear();
        handshake
    }

    /// (option, type, body) of each queued reply.
    fn replies(handshake: &mut Handshake) -> Vec<(u32, u32, Vec<u8>)> {
        let out = std::mem::take(&mut handshake.out);
        let mut rest = &out[..];
        let mut found = Vec::new();
        while !rest.is_empty() {
            assert_eq!(be64(rest, 0), Some(OPTION_REPLY_MAGIC));
            let len = be32(rest, 16).unwrap() as usize;
            found.push((
                be32(rest, 8).unwrap(),
                be32(rest, 12).unwrap(),
                rest[20..20 + len].to_vec(),
            ));
            rest = &rest[20 + len..];
        }
        found
    }

    #[test]
    fn go_reports_size_and_block_sizes_and_starts() {
        let mut handshake = started();
        let bytes = opt(option::GO, &go("r0/0", &[info::BLOCK_SIZE]));
        let (used, step) = handshake.step(&bytes);
        assert_eq!(used, bytes.len());
        let Step::Lookup(lookup) = step else {
            panic!("a question was expected, not {step:?}");
        };
        assert_eq!(
            (lookup.name.as_str(), lookup.purpose),
            ("r0/0", Purpose::Go)
        );
        assert_eq!(
            handshake.answer(Ok(export())),
            Some(Negotiated {
                style: HeaderStyle::Simple,
                base_allocation: false
            })
        );
        let replies = replies(&mut handshake);
        assert_eq!(replies.len(), 3);
        assert_eq!(replies[0].2, [0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0x55]);
        assert_eq!(replies[1].2, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
        assert_eq!(replies[2].1, option_reply::ACK);
    }

    #[test]
    fn a_refusal_carries_its_text_and_the_handshake_goes_on() {
        let mut handshake = started();
        handshake.step(&opt(option::GO, &go("r0/0", &[])));
        let text = "r0/0 is Secondary".to_string();
        assert_eq!(handshake.answer(Err(Refused::Policy(text.clone()))), None);
        assert_eq!(
            replies(&mut handshake),
            [(option::GO, option_reply::ERR_POLICY, text.into_bytes())]
        );
        let (_, step) = handshake.step(&opt(option::ABORT, &[]));
        assert_eq!(step, Step::Close);
    }

    #[test]
    fn large_blocks_are_refused_to_a_client_that_does_not_ask_for_block_sizes() {
        let mut handshake = started();
        let mut large = export();
        large.min_block_bytes = 4096;
        handshake.step(&opt(option::GO, &go("a", &[])));
        assert_eq!(handshake.answer(Ok(large.clone())), None);
        assert_eq!(
            replies(&mut handshake)[0].1,
            option_reply::ERR_BLOCK_SIZE_REQD
        );
        handshake.step(&opt(option::GO, &go("a", &[info::BLOCK_SIZE])));
        assert!(handshake.answer(Ok(large)).is_some());
    }

    #[test]
    fn contexts_count_only_for_their_export_and_need_structured_replies() {
        let mut query = Vec::new();
        put_string(&mut query, b"a");
        query.extend_from_slice(&1u32.to_be_bytes());
        put_string(&mut query, BASE_ALLOCATION);

        let mut handshake = started();
        handshake.step(&opt(option::SET_META_CONTEXT, &query));
        assert_eq!(replies(&mut handshake)[0].1, option_reply::ERR_INVALID);

        handshake.step(&opt(option::STRUCTURED_REPLY, &[]));
        handshake.step(&opt(option::SET_META_CONTEXT, &query));
        let answers = replies(&mut handshake);
        assert_eq!(answers[1].2, b"\0\0\0\x01base:allocation");
        handshake.step(&opt(option::GO, &go("b", &[])));
        let other = handshake.answer(Ok(export())).unwrap();
        assert!(!other.base_allocation);

        let mut handshake = started();
        handshake.step(&opt(option::EXTENDED_HEADERS, &[]));
        handshake.step(&opt(option::SET_META_CONTEXT, &query));
        handshake.step(&opt(option::STRUCTURED_REPLY, &[]));
        let kinds: Vec<u32> = replies(&mut handshake).iter().map(|r| r.1).collect();
        assert_eq!(kinds[3], option_reply::ERR_EXT_HEADER_REQD);
        handshake.step(&opt(option::GO, &go("a", &[])));
        assert_eq!(
            handshake.answer(Ok(export())),
            Some(Negotiated {
                style: HeaderStyle::Extended,
                base_allocation: true
            })
        );
    }

    #[test]
    fn export_name_sends_zeroes_only_to_clients_that_want_them() {
        for (flags, len) in [(1u32, 8 + 2 + 124), (3, 8 + 2)] {
            let mut handshake = Handshake::new();
            handshake.step(&flags.to_be_bytes());
            handshake.out.clear();
            handshake.step(&opt(option::EXPORT_NAME, b"r0/0"));
            assert!(handshake.answer(Ok(export())).is_some());
            assert_eq!(handshake.out.len(), len);
        }
    }

    #[test]
    fn malformed_options_are_refused_and_wrong_magic_closes() {
        let mut handshake = started();
        for data in [&b""[..], &[0, 0, 0, 9, b'x'], &[0, 0, 0, 0, 0, 1]] {
            handshake.step(&opt(option::GO, data));
            assert_eq!(replies(&mut handshake)[0].1, option_reply::ERR_INVALID);
        }
        handshake.step(&opt(option::LIST, b"x"));
        assert_eq!(replies(&mut handshake)[0].1, option_reply::ERR_INVALID);
        handshake.step(&opt(99, b"x"));
        assert_eq!(replies(&mut handshake)[0].1, option_reply::ERR_UNSUP);
        assert_eq!(handshake.step(&[0; 16]).1, Step::Close);
    }

    #[test]
    fn a_long_option_is_skipped_and_a_huge_one_closes() {
        let mut handshake = started();
        let long = opt(option::GO, &vec![0; 20_000]);
        let mut fed = 0;
        while fed < long.len() {
            let end = (fed + 1000).min(long.len());
            let (used, step) = handshake.step(&long[fed..end]);
            assert_eq!(step, Step::NeedBytes);
            assert!(used > 0);
            fed += used;
        }
        assert_eq!(replies(&mut handshake)[0].1, option_reply::ERR_TOO_BIG);
        let mut huge = OPTION_MAGIC.to_be_bytes().to_vec();
        huge.extend_from_slice(&[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(handshake.step(&huge).1, Step::Close);
    }
}
