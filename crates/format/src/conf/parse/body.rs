//! Resource, host and volume sections.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::super::lex::{Kind, Token};
use super::super::model::{
    Device, Disk, DiskSettings, Host, HostKind, MetaDisk, Pos, Proxy, Resource, Sections, Settings,
    SourceFile, Style, Template, Volume,
};
use super::super::options::Set;
use super::{Abort, Dialect, FileError, Parser, Severity};

/// Whose body is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Common,
    Resource,
}

impl Parser<'_, '_, '_> {
    /// `res-body` and `common-body`, behind the opening brace.
    pub(super) fn resource_body(
        &mut self,
        resource: &mut Resource,
        place: Place,
    ) -> Result<(), Abort> {
        while let Some(token) = self.statement()? {
            if token.kind != Kind::Word {
                return Err(self.wrong(&token, RESOURCE_WORDS));
            }
            if self.section(&token, resource)? {
                continue;
            }
            match (token.text.as_str(), place) {
                ("disk" | "device" | "meta-disk" | "flexible-meta-disk" | "volume", _) => {
                    self.volume_statement(&token, &mut resource.volumes, &resource.name)?;
                }
                ("skip", _) => self.skip()?,
                ("on" | "_this_host", Place::Resource) => self.on(&token, resource)?,
                ("floating", Place::Resource) => self.floating(&token, resource)?,
                ("stacked-on-top-of", Place::Resource) => self.stacked(&token, resource)?,
                ("connection", Place::Resource) => self.connection(&token, resource)?,
                ("connection-mesh", Place::Resource) => self.mesh(&token, resource)?,
                ("template-file", Place::Resource) => self.template(&token, resource)?,
                (_, Place::Resource) => return Err(self.wrong(&token, RESOURCE_WORDS)),
                (_, Place::Common) => return Err(self.wrong(&token, COMMON_WORDS)),
            }
        }
        Ok(())
    }

    /// The sections that `common`, templates and resources share; false for other statements.
    fn section(&mut self, token: &Token, resource: &mut Resource) -> Result<bool, Abort> {
        let pos = self.pos(token);
        let word = token.text.as_str();
        let known = match word {
            "disk" => self.peek()?.is('{'),
            "net" | "syncer" | "startup" | "handlers" | "proxy" | "options" | "protocol" => true,
            _ => false,
        };
        if !known {
            return Ok(false);
        }
        let (what, name) = section_key(word);
        self.state
            .claim(what, format!("{}:{name}", resource.name), pos);
        let sections = &mut resource.sections;
        if word == "protocol" {
            self.option(token, &mut [(Set::Net, &mut sections.net)])?;
            return Ok(true);
        }
        self.expect('{')?;
        while let Some(option) = self.statement()? {
            match word {
                "net" => self.option(&option, &mut [(Set::Net, &mut sections.net)])?,
                "options" => {
                    self.option(&option, &mut [(Set::Resource, &mut sections.options)])?;
                }
                "handlers" => {
                    self.option(&option, &mut [(Set::Handlers, &mut sections.handlers)])?;
                }
                "disk" => self.disk_option(&option, &mut sections.disk, Some(&mut sections.net))?,
                "startup" => self.startup_option(&option, sections)?,
                "proxy" => {
                    self.proxy_option(&option, &mut sections.proxy, &mut sections.plugins)?;
                }
                _ => self.syncer_option(option, sections)?,
            }
        }
        Ok(true)
    }

    fn startup_option(&mut self, token: &Token, sections: &mut Sections) -> Result<(), Abort> {
        match token.text.as_str() {
            "become-primary-on" => self.texts("host name").map(|_| ()),
            "stacked-timeouts" => {
                sections.stacked_timeouts = true;
                self.expect(';')
            }
            _ => self.option(token, &mut [(Set::Startup, &mut sections.startup)]),
        }
    }

    fn syncer_option(&mut self, mut token: Token, sections: &mut Sections) -> Result<(), Abort> {
        match token.text.as_str() {
            "rate" => token.text = "resync-rate".into(),
            "after" => token.text = "resync-after".into(),
            _ => {}
        }
        let disk = &mut sections.disk;
        self.option(
            &token,
            &mut [
                (Set::Net, &mut sections.net),
                (Set::Disk, &mut disk.disk),
                (Set::Resource, &mut sections.options),
                (Set::PeerDevice, &mut disk.peer_device),
            ],
        )
    }

    /// An option of a `disk` section; `fencing` belongs to `net` where there is one.
    fn disk_option(
        &mut self,
        token: &Token,
        disk: &mut DiskSettings,
        net: Option<&mut Settings>,
    ) -> Result<(), Abort> {
        if let (Some(net), "fencing") = (net, token.text.as_str()) {
            return self.option(token, &mut [(Set::Net, net)]);
        }
        self.option(
            token,
            &mut [
                (Set::Disk, &mut disk.disk),
                (Set::Device, &mut disk.device),
                (Set::PeerDevice, &mut disk.peer_device),
            ],
        )
    }

    /// An option or `plugin` block of a proxy.
    pub(super) fn proxy_option(
        &mut self,
        token: &Token,
        settings: &mut Settings,
        plugins: &mut Vec<String>,
    ) -> Result<(), Abort> {
        if token.text != "plugin" {
            return self.option(token, &mut [(Set::Proxy, settings)]);
        }
        self.expect('{')?;
        while let Some(first) = self.statement()? {
            if !first.is_text() {
                return Err(self.wrong(&first, "plugin name"));
            }
            let mut line = first.text;
            while !self.accept(';')? {
                line.push(' ');
                line.push_str(&self.text("; or plugin argument")?.text);
            }
            plugins.push(line);
        }
        Ok(())
    }

    fn on(&mut self, token: &Token, resource: &mut Resource) -> Result<(), Abort> {
        let pos = self.pos(token);
        let (names, kind) = match token.text.as_str() {
            "on" => match self.names("host name")? {
                (names, '{') => (names, HostKind::On),
                _ => {
                    let end = Token {
                        kind: Kind::Operator(';'),
                        text: ";".into(),
                        line: pos.line,
                    };
                    return Err(self.wrong(&end, "{"));
                }
            },
            _ if self.state.options.dialect != Dialect::Show => {
                return Err(self.wrong(token, RESOURCE_WORDS));
            }
            _ => {
                self.expect('{')?;
                (Vec::new(), HostKind::ThisHost)
            }
        };
        for name in &names {
            self.state
                .claim("host section", format!("{}: on {name}", resource.name), pos);
        }
        let host = self.host_body(kind, names, pos, resource)?;
        resource.hosts.push(host);
        Ok(())
    }

    fn floating(&mut self, token: &Token, resource: &mut Resource) -> Result<(), Abort> {
        let pos = self.pos(token);
        let address = self.address()?;
        let name = format!("{}_{}", address.host, address.port);
        self.state.claim(
            "host section",
            format!("{}: floating {name}", resource.name),
            pos,
        );
        let mut host = match self.accept(';')? {
            true => empty_host(HostKind::Floating, Vec::from([name]), pos),
            false => {
                self.expect('{')?;
                self.host_body(HostKind::Floating, Vec::from([name]), pos, resource)?
            }
        };
        host.address = Some(address);
        resource.hosts.push(host);
        Ok(())
    }

    fn stacked(&mut self, token: &Token, resource: &mut Resource) -> Result<(), Abort> {
        let pos = self.pos(token);
        let lower = self.name("resource name")?.text;
        self.state.claim("stacked-on-top-of", lower.clone(), pos);
        self.expect('{')?;
        let host = self.host_body(HostKind::Stacked { lower }, Vec::new(), pos, resource)?;
        resource.hosts.push(host);
        Ok(())
    }

    /// `host-body` and `stacked-body`, behind the opening brace.
    fn host_body(
        &mut self,
        kind: HostKind,
        names: Vec<String>,
        pos: Pos,
        resource: &Resource,
    ) -> Result<Host, Abort> {
        let mut host = empty_host(kind, names, pos);
        let name = match &host.kind {
            HostKind::Stacked { lower } => format!("stacked-on-top-of {lower}"),
            _ => host.joined_name(),
        };
        let key = format!("{}:{name}", resource.name);
        while let Some(token) = self.statement()? {
            let here = self.pos(&token);
            match token.text.as_str() {
                _ if token.kind != Kind::Word => return Err(self.wrong(&token, HOST_WORDS)),
                "address" => {
                    self.state.claim("address", key.clone(), here);
                    host.address = Some(self.address()?);
                    self.expect(';')?;
                }
                "node-id" => {
                    self.state.claim("node-id", key.clone(), here);
                    self.state.parsed.config.style = Style::V9;
                    let (id, at) = self.integer("node-id", 0, LARGEST_NODE_ID)?;
                    self.state
                        .claim("node-id of resource", format!("{}:{id}", resource.name), at);
                    host.node_id = Some(id);
                    self.expect(';')?;
                }
                "disk" | "device" | "meta-disk" | "flexible-meta-disk" | "volume" => {
                    self.volume_statement(&token, &mut host.volumes, &key)?;
                }
                "proxy" => {
                    if !self.accept_word("on")? {
                        let next = self.next()?;
                        return Err(self.wrong(&next, "on"));
                    }
                    host.proxy = Some(self.proxy_body(here)?);
                }
                "options" => {
                    self.expect('{')?;
                    while let Some(option) = self.statement()? {
                        self.option(&option, &mut [(Set::Resource, &mut host.options)])?;
                    }
                }
                "skip" => self.skip()?,
                _ => return Err(self.wrong(&token, HOST_WORDS)),
            }
        }
        Ok(host)
    }

    /// A proxy behind `proxy on`.
    pub(super) fn proxy_body(&mut self, pos: Pos) -> Result<Proxy, Abort> {
        let (hosts, end) = self.names("host name")?;
        let mut proxy = Proxy {
            hosts,
            pos,
            ..Proxy::default()
        };
        if end != '{' {
            let token = Token {
                kind: Kind::Operator(end),
                text: end.into(),
                line: pos.line,
            };
            return Err(self.wrong(&token, "{"));
        }
        while let Some(token) = self.statement()? {
            match token.text.as_str() {
                "inside" => proxy.inside = Some(self.address_statement()?),
                "outside" => proxy.outside = Some(self.address_statement()?),
                "options" => {
                    self.expect('{')?;
                    while let Some(option) = self.statement()? {
                        self.proxy_option(&option, &mut proxy.settings, &mut proxy.plugins)?;
                    }
                }
                _ => return Err(self.wrong(&token, "inside | outside | options")),
            }
        }
        if proxy.inside.is_none() || proxy.outside.is_none() {
            let text = "'inside' and 'outside' are both needed in 'proxy'.";
            self.state.report(Severity::Error, Some(pos), text.into());
        }
        Ok(proxy)
    }

    fn address_statement(&mut self) -> Result<super::super::model::Address, Abort> {
        let address = self.address()?;
        self.expect(';')?;
        Ok(address)
    }

    /// A statement of the implicit volume 0, or a `volume` section.
    fn volume_statement(
        &mut self,
        token: &Token,
        volumes: &mut Vec<Volume>,
        key: &str,
    ) -> Result<(), Abort> {
        let pos = self.pos(token);
        if token.text != "volume" {
            let implicit = volumes.iter().position(|volume| volume.implicit);
            let index = implicit.unwrap_or_else(|| {
                volumes.push(Volume {
                    implicit: true,
                    pos,
                    ..Volume::default()
                });
                volumes.len() - 1
            });
            return self.volume_option(token, &mut volumes[index], key);
        }
        let (number, _) = self.integer("volume", 0, LARGEST_VOLUME)?;
        let key = format!("{key}:{number}");
        self.state.claim("volume section", key.clone(), pos);
        self.expect('{')?;
        let mut volume = Volume {
            number,
            pos,
            ..Volume::default()
        };
        while let Some(token) = self.statement()? {
            match token.text.as_str() {
                _ if token.kind != Kind::Word => return Err(self.wrong(&token, VOLUME_WORDS)),
                "disk" | "device" | "meta-disk" | "flexible-meta-disk" => {
                    self.volume_option(&token, &mut volume, &key)?;
                }
                "tiebreaker" => {
                    let value = self.value_text("tiebreaker")?;
                    volume.tiebreaker = match value.text.as_str() {
                        "yes" => Some(true),
                        "no" => Some(false),
                        _ => return Err(self.wrong(&value, "yes | no")),
                    };
                    self.expect(';')?;
                }
                "skip" => self.skip()?,
                _ => return Err(self.wrong(&token, VOLUME_WORDS)),
            }
        }
        volumes.push(volume);
        Ok(())
    }

    fn volume_option(
        &mut self,
        token: &Token,
        volume: &mut Volume,
        key: &str,
    ) -> Result<(), Abort> {
        let pos = self.pos(token);
        match token.text.as_str() {
            "disk" if self.accept('{')? => {
                self.state.claim("disk section", key.into(), pos);
                volume.disk_pos = Some(pos);
                while let Some(option) = self.statement()? {
                    self.disk_option(&option, &mut volume.settings, None)?;
                }
                Ok(())
            }
            "disk" => {
                self.state.claim("disk statement", key.into(), pos);
                let path = self.text("path of the disk or none")?;
                // As with the original, quotes do not make a path of the word.
                volume.disk = Some(match path.text.as_str() {
                    "none" => Disk::None,
                    _ => Disk::Path(path.text),
                });
                self.expect(';')
            }
            "device" => {
                self.state.claim("device statement", key.into(), pos);
                volume.device = Some(self.device(pos)?);
                Ok(())
            }
            _ => {
                self.state.claim("meta-disk statement", key.into(), pos);
                let path = self.text("internal or path of the meta-disk")?;
                let may_have_index = token.text == "meta-disk";
                volume.meta_disk = Some(if path.text == "internal" {
                    MetaDisk::Internal
                } else if may_have_index && self.accept('[')? {
                    let (index, _) = self.integer("index", 0, LARGEST_MD_INDEX)?;
                    self.expect(']')?;
                    MetaDisk::Indexed(path.text, index)
                } else {
                    MetaDisk::Flexible(path.text)
                });
                self.expect(';')
            }
        }
    }

    /// `device-spec` of the grammar.
    fn device(&mut self, pos: Pos) -> Result<Device, Abort> {
        let name = match self.accept_word("minor")? {
            true => None,
            false => {
                let name = self.text("device name or minor")?.text;
                Some(if name.starts_with("drbd") {
                    format!("/dev/{name}")
                } else {
                    name
                })
            }
        };
        let written = match name.is_none() || self.accept_word("minor")? {
            true => Some(self.integer("minor", 0, LARGEST_MINOR)?.0),
            false => None,
        };
        self.expect(';')?;
        let digits = name
            .as_deref()
            .and_then(|name| name.strip_prefix("/dev/drbd"));
        let derived: Option<u32> = digits.and_then(|digits| digits.parse().ok());
        if written.is_none() && derived.is_none() {
            let text = "no minor given nor device name contains a minor number";
            self.state.report(Severity::Error, Some(pos), text.into());
        }
        let minor = written.or(derived).unwrap_or(0);
        Ok(Device { name, minor, pos })
    }

    fn template(&mut self, token: &Token, resource: &mut Resource) -> Result<(), Abort> {
        let pos = self.pos(token);
        self.state
            .claim("template-file", resource.name.clone(), pos);
        self.state.parsed.config.style = Style::V9;
        let file = self.text("file name")?.text;
        self.expect(';')?;
        let including = self.state.parsed.config.files[self.file as usize]
            .path
            .clone();
        let path = self
            .state
            .files
            .expand(&including, &file)
            .into_iter()
            .next();
        let path = path.unwrap_or_else(|| file.clone());
        let found = match self.state.files.read(&path) {
            Ok(found) => found,
            Err(error) => {
                let reason = match error {
                    FileError::Missing => "no such file".into(),
                    FileError::Unreadable(reason) => reason,
                };
                let text = format!("Failed to open template file '{file}'.\n\t{reason}");
                self.state.report(Severity::Error, Some(pos), text);
                return Ok(());
            }
        };
        // The template may be used by many resources, so it is read again each time and does
        // not count as an included file.
        let source = SourceFile {
            shown: path,
            path: found.path.clone(),
        };
        let files = &mut self.state.parsed.config.files;
        let index = files.iter().position(|known| *known == source);
        let index = index.unwrap_or_else(|| {
            files.push(source);
            files.len() - 1
        });
        let mut shell = Resource {
            name: format!("template of {}", resource.name),
            pos: Pos {
                file: index as u32,
                line: 1,
            },
            ..Resource::default()
        };
        let mut parser = Parser::new(&mut *self.state, &found.text, index as u32, self.depth);
        let first = parser.next()?;
        if !first.is_word("common") {
            return Err(parser.wrong(&first, "common"));
        }
        parser.expect('{')?;
        parser.resource_body(&mut shell, Place::Common)?;
        let last = parser.next()?;
        if last.kind != Kind::End {
            return Err(parser.wrong(&last, "end of file"));
        }
        resource.template = Some(Template {
            file: found.path,
            sections: shell.sections,
        });
        Ok(())
    }
}

fn empty_host(kind: HostKind, names: Vec<String>, pos: Pos) -> Host {
    Host {
        kind,
        names,
        node_id: None,
        address: None,
        proxy: None,
        volumes: Vec::new(),
        effective: Vec::new(),
        options: Settings::default(),
        pos,
    }
}

/// How a repeated section is reported.
fn section_key(word: &str) -> (&'static str, &'static str) {
    match word {
        "disk" => ("disk section", "disk"),
        "net" => ("net section", "net"),
        "syncer" => ("syncer section", "syncer"),
        "startup" => ("startup section", "startup"),
        "handlers" => ("handlers section", "handlers"),
        "proxy" => ("proxy section", "proxy"),
        "protocol" => ("protocol statement", "protocol"),
        _ => ("options section", "options"),
    }
}

const RESOURCE_WORDS: &str = "protocol | on | disk | net | syncer | startup | handlers | \
    connection | connection-mesh | options | proxy | volume | device | meta-disk | floating | \
    template-file | stacked-on-top-of | skip";
const COMMON_WORDS: &str =
    "protocol | disk | net | syncer | startup | handlers | options | proxy | volume | skip";
const HOST_WORDS: &str =
    "node-id | address | volume | device | disk | meta-disk | proxy | options | skip";
const VOLUME_WORDS: &str = "device | disk | meta-disk | flexible-meta-disk | tiebreaker | skip";

/// Largest node id that the file's checker lets through; the replication engine takes up to 31.
const LARGEST_NODE_ID: u32 = 32;
/// Largest volume number.
const LARGEST_VOLUME: u32 = 65_535;
/// Largest minor number.
const LARGEST_MINOR: u32 = 1_048_575;
/// Largest index of metadata on a shared device.
const LARGEST_MD_INDEX: u32 = 65_535;
