//! Connections, paths and meshes.

use alloc::format;
use alloc::string::String;

use super::super::lex::{Kind, Token};
use super::super::model::{
    Connection, Endpoint, Mesh, Origin, Path, PeerVolume, Resource, Settings, Style, Via,
};
use super::super::options::Set;
use super::{Abort, Dialect, Parser, Severity};

impl Parser<'_, '_, '_> {
    pub(super) fn connection(
        &mut self,
        token: &Token,
        resource: &mut Resource,
    ) -> Result<(), Abort> {
        let pos = self.pos(token);
        self.state.parsed.config.style = Style::V9;
        let mut connection = Connection {
            origin: Origin::Written,
            pos,
            ..Connection::default()
        };
        if self.peek()?.is_text() {
            let name = self.text("{")?.text;
            let text = format!(
                "explicitly named connections are deprecated!\n\
                 \tits name ('{name}') will be ignored"
            );
            self.state.report(Severity::Warning, Some(pos), text);
            connection.name = Some(name);
        }
        let key = format!(
            "{}:connection {}",
            resource.name,
            resource.connections.len()
        );
        self.expect('{')?;
        let mut implicit = Path {
            pos,
            ..Path::default()
        };
        while let Some(token) = self.statement()? {
            if token.kind != Kind::Word {
                return Err(self.wrong(&token, CONNECTION_WORDS));
            }
            self.connection_statement(&token, &mut connection, &mut implicit, &key)?;
        }
        let has_implicit = !implicit.ends.is_empty();
        if has_implicit && connection.explicit_paths {
            let text = "'host' and 'path' may not be mixed in one connection.";
            self.state.report(Severity::Error, Some(pos), text.into());
        } else if has_implicit {
            connection.paths.push(implicit);
        }
        if connection.paths.is_empty() && self.state.options.dialect == Dialect::File {
            let text = "connection without a single path (maybe empty?) not allowed";
            self.state.report(Severity::Error, Some(pos), text.into());
        }
        for path in &connection.paths {
            if path.ends.len() != 2 && self.state.options.dialect == Dialect::File {
                let text = format!(
                    "Resource {}: connection needs to have two endpoints",
                    resource.name
                );
                self.state.report(Severity::Error, Some(path.pos), text);
            }
        }
        resource.connections.push(connection);
        Ok(())
    }

    fn connection_statement(
        &mut self,
        token: &Token,
        connection: &mut Connection,
        implicit: &mut Path,
        key: &str,
    ) -> Result<(), Abort> {
        let pos = self.pos(token);
        let show = self.state.options.dialect == Dialect::Show;
        match token.text.as_str() {
            "host" | "address" => self.endpoint(token, implicit)?,
            "path" => {
                connection.explicit_paths = true;
                self.expect('{')?;
                let mut path = Path {
                    pos,
                    ..Path::default()
                };
                while let Some(token) = self.statement()? {
                    match token.text.as_str() {
                        "host" | "address" => self.endpoint(&token, &mut path)?,
                        "_this_host" if show => {
                            path.this_host = Some(self.address()?);
                            self.expect(';')?;
                        }
                        "_remote_host" if show => {
                            path.remote_host = Some(self.address()?);
                            self.expect(';')?;
                        }
                        _ => return Err(self.wrong(&token, "host | address")),
                    }
                }
                connection.paths.push(path);
            }
            "net" => {
                self.state.claim("net section", key.into(), pos);
                self.option_block(Set::Net, &mut connection.net)?;
            }
            "disk" => {
                self.state.claim("disk section", key.into(), pos);
                self.option_block(Set::PeerDevice, &mut connection.peer_device)?;
            }
            "volume" => {
                let volume = self.peer_volume()?;
                let key = format!("{key}:{}", volume.number);
                self.state.claim("volume section", key, pos);
                connection.volumes.push(volume);
            }
            "skip" => self.skip()?,
            "_peer_node_id" if show => {
                connection.peer_node_id = Some(self.integer("_peer_node_id", 0, u32::MAX)?.0);
                self.expect(';')?;
            }
            "_cstate" if show => {
                connection.state = Some(self.text("connection state")?.text);
                self.expect(';')?;
            }
            "_is_standalone" if show => {
                connection.state = Some(String::from("StandAlone"));
                self.expect(';')?;
            }
            "_this_host" | "_remote_host" if show => {
                let address = self.address()?;
                self.expect(';')?;
                if connection.paths.is_empty() {
                    connection.paths.push(Path {
                        pos,
                        ..Path::default()
                    });
                }
                let path = &mut connection.paths[0];
                match token.text.as_str() {
                    "_this_host" => path.this_host = Some(address),
                    _ => path.remote_host = Some(address),
                }
            }
            _ => return Err(self.wrong(token, CONNECTION_WORDS)),
        }
        Ok(())
    }

    /// A `host` or `address` line of a path.
    fn endpoint(&mut self, token: &Token, path: &mut Path) -> Result<(), Abort> {
        let pos = self.pos(token);
        let mut end = Endpoint {
            pos,
            ..Endpoint::default()
        };
        if token.text == "address" {
            end.address = Some(self.address()?);
        } else {
            end.host_name = Some(self.name("host name")?.text);
            if self.accept_word("address")? {
                end.address = Some(self.address()?);
            } else if self.accept_word("port")? {
                let (port, _) = self.integer("port", 1, 65535)?;
                end.port = Some(u16::try_from(port).unwrap_or(u16::MAX));
            }
        }
        if self.accept_word("via")? {
            end.via = Some(self.via()?);
        } else {
            self.expect(';')?;
        }
        if path.ends.len() == 2 {
            let text = "only two hosts are allowed per path";
            self.state.report(Severity::Error, Some(pos), text.into());
            return Ok(());
        }
        path.ends.push(end);
        Ok(())
    }

    fn via(&mut self) -> Result<Via, Abort> {
        if self.accept_word("outside-address")? {
            let address = self.address()?;
            self.expect(';')?;
            return Ok(Via::OutsideAddress(address));
        }
        let token = self.next()?;
        if !token.is_word("proxy") {
            return Err(self.wrong(&token, "proxy | outside-address"));
        }
        if !self.accept_word("on")? {
            let next = self.next()?;
            return Err(self.wrong(&next, "on"));
        }
        let pos = self.pos(&token);
        Ok(Via::Proxy(self.proxy_body(pos)?))
    }

    /// The options of one set in braces.
    fn option_block(&mut self, set: Set, settings: &mut Settings) -> Result<(), Abort> {
        self.expect('{')?;
        while let Some(option) = self.statement()? {
            self.option(&option, &mut [(set, &mut *settings)])?;
        }
        Ok(())
    }

    /// `volume N { disk { ... } }` of a connection.
    fn peer_volume(&mut self) -> Result<PeerVolume, Abort> {
        let (number, _) = self.integer("volume", 0, 65_535)?;
        let mut volume = PeerVolume {
            number,
            ..PeerVolume::default()
        };
        self.expect('{')?;
        while let Some(token) = self.statement()? {
            match token.text.as_str() {
                "disk" => self.option_block(Set::PeerDevice, &mut volume.settings)?,
                "skip" => self.skip()?,
                _ => return Err(self.wrong(&token, "disk")),
            }
        }
        Ok(volume)
    }

    pub(super) fn mesh(&mut self, token: &Token, resource: &mut Resource) -> Result<(), Abort> {
        let pos = self.pos(token);
        self.state.parsed.config.style = Style::V9;
        let mut mesh = Mesh {
            pos,
            ..Mesh::default()
        };
        let key = format!(
            "{}:connection-mesh {}",
            resource.name,
            resource.meshes.len()
        );
        self.expect('{')?;
        while let Some(token) = self.statement()? {
            let here = self.pos(&token);
            match token.text.as_str() {
                "hosts" => match self.names("host name")? {
                    (hosts, ';') => {
                        self.state.claim("hosts statement", key.clone(), here);
                        mesh.hosts = hosts;
                    }
                    _ => return Err(self.wrong(&token, "; behind the hosts")),
                },
                "net" => {
                    self.state.claim("net section", key.clone(), here);
                    self.option_block(Set::Net, &mut mesh.net)?;
                }
                _ => return Err(self.wrong(&token, "hosts | net")),
            }
        }
        if mesh.hosts.len() < 2 {
            let text = "a connection-mesh needs at least two hosts";
            self.state.report(Severity::Error, Some(pos), text.into());
        }
        if mesh.hosts.len() > MOST_MESH_HOSTS {
            let text = format!("a connection-mesh may have at most {MOST_MESH_HOSTS} hosts");
            self.state.report(Severity::Error, Some(pos), text);
            mesh.hosts.truncate(MOST_MESH_HOSTS);
        }
        resource.meshes.push(mesh);
        Ok(())
    }
}

const CONNECTION_WORDS: &str = "host | address | path | net | disk | volume | skip";
/// A resource has at most 32 nodes.
const MOST_MESH_HOSTS: usize = 32;
