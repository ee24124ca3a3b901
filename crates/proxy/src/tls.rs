//! Encryption and identity of carriers: TLS 1.3 with mutual authentication by a shared secret, by
//! pinned keys or by certificates of a private authority.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer,
    UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    AlwaysResolvesServerRawPublicKeys, ClientHello, ParsedCertificate, ResolvesServerCert,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection,
    DigitallySignedStruct, DistinguishedName, Error, InvalidMessage, RootCertStore, ServerConfig,
    ServerConnection, SignatureScheme,
};
use sha2::Sha256;

use crate::core::identity::{Names, Peer};
use crate::daemon::SharedSecret;

/// Shortest shared secret: 128 bits, if it is random.
const SECRET_MIN: usize = 16;
/// DER around a 32-byte Ed25519 seed (PKCS#8).
const PKCS8_PREFIX: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// How the two proxies know each other.
#[derive(Clone, Debug)]
pub(crate) enum Identity {
    /// No encryption, no authentication; only by explicit wish.
    Insecure,
    Tls(Tls),
}

/// Ready-made configurations for both roles.
#[derive(Clone)]
pub(crate) struct Tls {
    /// More than one only with several secrets: the first that is for a connection dials for it.
    clients: Vec<(Option<Names>, Arc<ClientConfig>)>,
    server: Arc<ServerConfig>,
    /// With several secrets: what the accepting end proves itself with, in their order.
    listeners: Vec<(Option<Names>, Arc<CertifiedKey>)>,
    /// Who is known by name or key, with the connections that each may use.
    peers: Vec<KnownPeer>,
    /// Raw keys: the name that is dialled is only a hint.
    raw: bool,
    /// The own certificate cannot be used yet, or no more.
    outdated: Option<String>,
}

/// A configured connection, as far as choosing an identity goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends<'a> {
    /// Name in this configuration.
    pub(crate) name: &'a str,
    pub(crate) my_outside: SocketAddr,
    pub(crate) peer_outside: SocketAddr,
}

#[derive(Clone)]
struct KnownPeer {
    who: Who,
    /// What stands for the identity: both keys of a secret are one.
    id: Vec<u8>,
    /// `None`: every connection.
    may_use: Option<Names>,
}

#[derive(Clone)]
enum Who {
    /// A raw public key, as DER.
    Key(Vec<u8>),
    /// A name in a certificate.
    Name(ServerName<'static>),
}

/// Splits `WHO=CONNECTIONS` and reads the list.
fn with_list(text: &str) -> Result<(&str, Option<Names>), String> {
    match text.trim().split_once('=') {
        Some((who, list)) => Ok((who.trim(), Some(Names::parse(list.trim())?))),
        None => Ok((text.trim(), None)),
    }
}

/// Where several peers are known, nobody gets at the connections of another by an oversight.
fn check_lists(option: &str, peers: &[KnownPeer]) -> Result<(), String> {
    if peers.len() > 1 && peers.iter().any(|peer| peer.may_use.is_none()) {
        return Err(no_list("peers", option));
    }
    Ok(())
}

fn no_list(several: &str, option: &str) -> String {
    format!(
        "with several {several} each needs the list of connections that it may use, such as \
         {option} ...=r0-bob-alice,web-* (or =* for all)"
    )
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Both ends hold the same secret, or several, each with its list of connections.
    ///
    /// Each role has a key pair derived from the secret, so a proof by one role cannot be played
    /// back to the other, and nothing of the secret is sent.
    pub(crate) fn from_secrets(secrets: &[SharedSecret]) -> Result<Tls, String> {
        let (mut keys, mut known, mut clients) = (Vec::new(), Vec::new(), Vec::new());
        for given in secrets {
            let may_use = given.connections.as_deref().map(Names::parse).transpose()?;
            let [dialer, listener] = secret_keys(&given.secret)?;
            for key in [&dialer, &listener] {
                let (who, id) = (Who::Key(key.cert[0].to_vec()), listener.cert[0].to_vec());
                let may_use = may_use.clone();
                known.push(KnownPeer { who, id, may_use });
            }
            keys.push((may_use, dialer, listener));
        }
        let vague = keys.iter().any(|(may_use, ..)| may_use.is_none());
        if keys.len() > 1 && vague {
            return Err(no_list("secrets", "--secret-file"));
        }
        let Some((_, _, first)) = keys.first() else {
            return Err("no shared secret is given".into());
        };
        let server = raw_server(first.clone(), keys.iter().map(|(_, dialer, _)| pin(dialer)))?;
        let mut listeners = Vec::new();
        for (may_use, dialer, listener) in keys {
            let client = raw_client(dialer, [pin(&listener)])?;
            clients.push((may_use.clone(), client));
            listeners.push((may_use, Arc::new(listener)));
        }
        if listeners.len() == 1 {
            listeners.clear();
        }
        known.retain(|peer| peer.may_use.is_some());
        Ok(Tls {
            clients,
            server,
            listeners,
            peers: known,
            raw: true,
            outdated: None,
        })
    }

    /// The own private key (64 hex digits) and the public keys of the peers (hex).
    pub(crate) fn from_keys(own: &str, peers: &[String]) -> Result<Tls, String> {
        let seed = unhex(own.trim())
            .and_then(|bytes| <[u8; 32]>::try_from(bytes).ok())
            .ok_or("the private key must be 64 hex digits; 'lockstep proxy keygen' makes one")?;
        if peers.is_empty() {
            return Err("no peer key is given; add --peer-key".into());
        }
        let (mut pins, mut known) = (Vec::new(), Vec::new());
        for peer in peers {
            let (key, may_use) = with_list(peer)?;
            let key = unhex(key)
                .filter(|bytes| bytes.len() == 44)
                .ok_or(format!("peer key '{key}' must be 88 hex digits"))?;
            pins.push(key.clone());
            let (who, id) = (Who::Key(key.clone()), key);
            known.push(KnownPeer { who, id, may_use });
        }
        check_lists("--peer-key", &known)?;
        let key = raw_key(&seed)?;
        Ok(Tls {
            clients: vec![(None, raw_client(key.clone(), pins.clone())?)],
            server: raw_server(key, pins)?,
            listeners: Vec::new(),
            peers: known,
            raw: true,
            outdated: None,
        })
    }

    /// Certificates: own chain and key, and the authority that both ends trust. The peer's
    /// certificate must bear one of `peer_names`, or the address that is dialled.
    pub(crate) fn from_files(
        cert: &Path,
        key: &Path,
        authority: &Path,
        peer_names: &[String],
    ) -> Result<Tls, String> {
        let named =
            |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let chain = |path: &Path| {
            CertificateDer::pem_file_iter(path)
                .and_then(|certs| certs.collect::<Result<Vec<_>, _>>())
                .map_err(|error| named(path, &error))
        };
        let own = chain(cert)?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|error| named(key, &error))?;
        let mut roots = RootCertStore::empty();
        for root in chain(authority)? {
            roots.add(root).map_err(|error| named(authority, &error))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server_verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|error| named(authority, &error))?;
        let client_verifier =
            WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
                .build()
                .map_err(|error| named(authority, &error))?;
        let outdated = own.split_first().and_then(|(own, chain)| {
            let checked = client_verifier.verify_client_cert(own, chain, UnixTime::now());
            match checked.err()? {
                Error::InvalidCertificate(
                    error @ (CertificateError::Expired
                    | CertificateError::ExpiredContext { .. }
                    | CertificateError::NotValidYet
                    | CertificateError::NotValidYetContext { .. }),
                ) => Some(named(cert, &error)),
                _ => None,
            }
        });
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| error.to_string())?
            .with_webpki_verifier(server_verifier)
            .with_client_auth_cert(own.clone(), private.clone_key())
            .map_err(|error| named(cert, &error))?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| error.to_string())?
            .with_client_cert_verifier(client_verifier)
            .with_single_cert(own, private)
            .map_err(|error| named(cert, &error))?;
        let mut peers = Vec::new();
        for text in peer_names {
            let (name, may_use) = with_list(text)?;
            let id = name.as_bytes().to_vec();
            let name = ServerName::try_from(name.to_string()).map_err(|_| {
                format!("--peer-name '{name}' is neither a host name nor an address")
            })?;
            let who = Who::Name(name);
            peers.push(KnownPeer { who, id, may_use });
        }
        check_lists("--peer-name", &peers)?;
        Ok(Tls {
            clients: vec![(None, Arc::new(client))],
            server: Arc::new(server),
            listeners: Vec::new(),
            peers,
            raw: false,
            outdated,
        })
    }

    /// An error when a certificate's own dates forbid its use. That it is signed by an authority
    /// that the peer trusts can be judged there alone.
    pub(crate) fn check_dates(&self) -> Result<(), String> {
        self.outdated.clone().map_or(Ok(()), Err)
    }

    /// Who has authenticated at the other end of a connection.
    pub(crate) fn peer_of(&self, connection: &Connection) -> Peer {
        let binding = connection
            .export_keying_material([0; 32], b"EXPORTER-lockstep-proxy", None)
            .expect("the handshake is done, and the length is allowed");
        let cert = connection
            .peer_certificates()
            .and_then(|chain| chain.first());
        let is_peer = |known: &&KnownPeer| match (&known.who, cert) {
            (_, None) => false,
            (Who::Key(key), Some(cert)) => key.as_slice() == cert.as_ref(),
            (Who::Name(name), Some(cert)) => ParsedCertificate::try_from(cert)
                .is_ok_and(|cert| verify_server_name(&cert, name).is_ok()),
        };
        let mut may_use = (!self.peers.is_empty()).then(Names::none);
        let mut identity = [0; 32];
        for known in self.peers.iter().filter(is_peer) {
            identity = hmac(&identity, &known.id);
            may_use = match (&may_use, &known.may_use) {
                (Some(names), Some(more)) => Some(names.and(more)),
                _ => None,
            };
        }
        Peer {
            binding,
            identity,
            may_use,
        }
    }

    /// The dialling end of a carrier for a connection.
    pub(crate) fn dial(&self, ends: Ends<'_>) -> Result<Connection, String> {
        let is_for = |names: &Option<Names>| names.as_ref().is_none_or(|n| n.has(ends.name));
        let client = self.clients.iter().find(|(names, _)| is_for(names));
        let Some((_, client)) = client else {
            return Err(format!(
                "no secret is for connection {}; see --secret-file FILE=CONNECTIONS",
                ends.name
            ));
        };
        let named = self.peers.iter().find_map(|known| match &known.who {
            Who::Name(name) => is_for(&known.may_use).then_some(name.clone()),
            Who::Key(_) => None,
        });
        let name = match named {
            Some(name) => name,
            // Keys are known by themselves; the name tells the listener which of its secrets.
            None if self.raw => ServerName::try_from(hint(ends.peer_outside, ends.my_outside))
                .map_err(|error| error.to_string())?,
            None => ServerName::IpAddress(ends.peer_outside.ip().into()),
        };
        let client = ClientConnection::new(Arc::clone(client), name);
        Ok(client.map_err(|error| error.to_string())?.into())
    }

    /// The accepting end of a carrier, on an outside address. With several secrets the dialling
    /// end's hint says which connection it is for, and that one's secret is used; where the hint
    /// fits none (addresses are translated on the way), that of the only connection here.
    pub(crate) fn accept<'a>(
        &self,
        listener: SocketAddr,
        known: impl Iterator<Item = Ends<'a>>,
    ) -> Result<Connection, String> {
        let mut server = Arc::clone(&self.server);
        if let Some((_, first)) = self.listeners.first() {
            let key_of = |ends: &Ends<'_>| {
                let is_for =
                    |names: &Option<Names>| names.as_ref().is_some_and(|n| n.has(ends.name));
                let found = self.listeners.iter().find(|(names, _)| is_for(names));
                found.map(|(_, key)| Arc::clone(key))
            };
            let (mut by_hint, mut here) = (BTreeMap::new(), Vec::new());
            for ends in known {
                let Some(key) = key_of(&ends) else { continue };
                if ends.my_outside == listener {
                    here.push(Arc::clone(&key));
                }
                by_hint.insert(hint(ends.my_outside, ends.peer_outside), key);
            }
            let otherwise = match here.as_slice() {
                [only] => Arc::clone(only),
                _ => Arc::clone(first),
            };
            let mut config = (*server).clone();
            config.cert_resolver = Arc::new(BySecret { by_hint, otherwise });
            server = Arc::new(config);
        }
        let server = ServerConnection::new(server);
        Ok(server.map_err(|error| error.to_string())?.into())
    }
}

/// Why a handshake failed, in the words of who set it up.
pub(crate) fn failure(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure) => {
            "the other end proves itself with another secret or key than is expected here".into()
        }
        Error::AlertReceived(
            AlertDescription::AccessDenied
            | AlertDescription::UnknownCA
            | AlertDescription::BadCertificate,
        ) => format!("the other end does not accept the secret, key or certificate here ({error})"),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "what came is not TLS; the other end is no such proxy, or has --insecure".into()
        }
        other => other.to_string(),
    }
}

/// What the dialling end calls the connection, in clear: a digest of the addresses that are on the
/// packets anyway. Nothing of a secret is in it.
fn hint(listener: SocketAddr, dialer: SocketAddr) -> String {
    let digest = hmac(
        b"lockstep proxy v1 connection",
        format!("{listener} {dialer}").as_bytes(),
    );
    format!("lockstep-{}", hex(&digest[..16]))
}

/// Key pairs of the dialling and the accepting end.
fn secret_keys(secret: &[u8]) -> Result<[CertifiedKey; 2], String> {
    let secret = secret.trim_ascii();
    if secret.len() < SECRET_MIN {
        return Err(format!(
            "the shared secret has {} bytes, at least {SECRET_MIN} random ones are needed; \
             'lockstep proxy keygen --secret' makes one",
            secret.len()
        ));
    }
    let extracted = hmac(b"lockstep proxy v1 secret", secret);
    let seed = |label: &[u8]| hmac(&extracted, &[label, &[1]].concat());
    Ok([raw_key(&seed(b"dialer"))?, raw_key(&seed(b"listener"))?])
}

/// The public key of a pair.
fn pin(key: &CertifiedKey) -> Vec<u8> {
    key.cert[0].to_vec()
}

fn pinned(pins: impl IntoIterator<Item = Vec<u8>>, provider: &CryptoProvider) -> Arc<Pinned> {
    Arc::new(Pinned {
        keys: pins.into_iter().collect(),
        algorithms: provider.signature_verification_algorithms,
    })
}

/// Dials with this key those who have one of the pinned ones.
fn raw_client(
    key: CertifiedKey,
    pins: impl IntoIterator<Item = Vec<u8>>,
) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let pinned = pinned(pins, &provider);
    let key = AlwaysResolvesClientRawPublicKeys::new(Arc::new(key));
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(pinned)
        .with_client_cert_resolver(Arc::new(key));
    Ok(Arc::new(config))
}

/// Accepts with this key those who have one of the pinned ones.
fn raw_server(
    key: CertifiedKey,
    pins: impl IntoIterator<Item = Vec<u8>>,
) -> Result<Arc<ServerConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let pinned = pinned(pins, &provider);
    let key = AlwaysResolvesServerRawPublicKeys::new(Arc::new(key));
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?
        .with_client_cert_verifier(pinned)
        .with_cert_resolver(Arc::new(key));
    Ok(Arc::new(config))
}

/// The key of the secret that is for the connection which the dialling end means.
#[derive(Debug)]
struct BySecret {
    by_hint: BTreeMap<String, Arc<CertifiedKey>>,
    otherwise: Arc<CertifiedKey>,
}

impl ResolvesServerCert for BySecret {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let hinted = hello.server_name().and_then(|name| self.by_hint.get(name));
        Some(Arc::clone(hinted.unwrap_or(&self.otherwise)))
    }

    fn only_raw_public_keys(&self) -> bool {
        true
    }
}

/// Accepts exactly the pinned public keys.
#[derive(Debug)]
struct Pinned {
    keys: Vec<Vec<u8>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Pinned {
    fn check(&self, key: &CertificateDer<'_>) -> Result<(), Error> {
        if self.keys.iter().any(|pin| pin.as_slice() == key.as_ref()) {
            Ok(())
        } else {
            Err(Error::InvalidCertificate(
                CertificateError::ApplicationVerificationFailure,
            ))
        }
    }

    fn signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.algorithms)
    }
}

/// TLS 1.2 is not offered, so its signatures never come.
fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("only TLS 1.3 is spoken".into()))
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity)
            .map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity)
            .map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The public key (hex) that belongs to a private one, for the peer's `--peer-key`.
pub(crate) fn public_of(seed: &[u8; 32]) -> Result<String, String> {
    Ok(hex(&raw_key(seed)?.cert[0]))
}

/// Bytes as hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok())
        .collect()
}

fn raw_key(seed: &[u8; 32]) -> Result<CertifiedKey, String> {
    let der = PrivatePkcs8KeyDer::from([PKCS8_PREFIX.as_slice(), seed].concat());
    let provider: CryptoProvider = rustls::crypto::ring::default_provider();
    let key = provider
        .key_provider
        .load_private_key(PrivateKeyDer::Pkcs8(der))
        .map_err(|error| error.to_string())?;
    let public = key.public_key().ok_or("the key has no public part")?;
    Ok(CertifiedKey::new(
        vec![CertificateDer::from(public.to_vec())],
        key,
    ))
}

fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(message);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets both ends talk until one fails or both are through.
    fn handshake(dialer: &Tls, listener: &Tls) -> Result<[Peer; 2], Error> {
        meet(dialer, listener, "r0", &["r0"])
    }

    /// Connections have the port of their number in `0..`; the dialling end means `name`.
    fn meet(
        dialer: &Tls,
        listener: &Tls,
        name: &str,
        configured: &[&str],
    ) -> Result<[Peer; 2], Error> {
        let at = |host: u8, port: usize| SocketAddr::from(([192, 0, 2, host], port as u16));
        let number = configured.iter().position(|known| *known == name);
        let dialled = Ends {
            name,
            my_outside: at(1, number.unwrap_or(99)),
            peer_outside: at(2, 7715),
        };
        let known = configured.iter().enumerate().map(|(number, name)| Ends {
            name,
            my_outside: at(2, 7715),
            peer_outside: at(1, number),
        });
        let mut client = dialer.dial(dialled).map_err(Error::General)?;
        let mut server = listener
            .accept(at(2, 7715), known)
            .map_err(Error::General)?;
        for _ in 0..20 {
            let mut wire = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut wire).unwrap();
            }
            let mut rest = wire.as_slice();
            while !rest.is_empty() {
                server.read_tls(&mut rest).unwrap();
                server.process_new_packets()?;
            }
            wire.clear();
            while server.wants_write() {
                server.write_tls(&mut wire).unwrap();
            }
            let mut rest = wire.as_slice();
            while !rest.is_empty() {
                client.read_tls(&mut rest).unwrap();
                client.process_new_packets()?;
            }
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        Ok([dialer.peer_of(&client), listener.peer_of(&server)])
    }

    #[test]
    fn equal_secrets_meet_and_different_ones_do_not() {
        let one = |secret: &[u8]| Tls::from_secrets(&[SharedSecret::for_all(secret)]);
        let a = one(b"0123456789abcdef0123456789abcdef\n").unwrap();
        let b = one(b"0123456789abcdef0123456789abcdef").unwrap();
        let wrong = one(b"0123456789abcdef0123456789abcdeX").unwrap();
        assert!(handshake(&a, &b).is_ok());
        assert!(handshake(&a, &wrong).is_err());
        assert!(handshake(&wrong, &a).is_err());
        let short = one(b"secret").unwrap_err();
        assert!(short.contains("at least 16"), "{short}");
    }

    #[test]
    fn each_of_several_secrets_opens_its_own_connections_and_no_others() {
        let secret = |letter: u8, list: Option<&str>| SharedSecret {
            secret: vec![letter; 32],
            connections: list.map(String::from),
        };
        let hub = [secret(b'a', Some("r0-a-*")), secret(b'b', Some("r0-b-*,x"))];
        let hub = Tls::from_secrets(&hub).unwrap();
        let site = |letter| Tls::from_secrets(&[secret(letter, None)]).unwrap();
        let (site_a, site_b) = (site(b'a'), site(b'b'));
        let configured = ["r0-a-hub", "r0-b-hub", "other"];
        // Either site meets it for its own connection, and is held to its list.
        let [_, seen] = meet(&site_a, &hub, "r0-a-hub", &configured).unwrap();
        assert_eq!(seen.refusal("r0-a-hub"), None);
        assert!(seen.refusal("r0-b-hub").is_some() && seen.refusal("other").is_some());
        let [_, seen] = meet(&site_b, &hub, "r0-b-hub", &configured).unwrap();
        assert_eq!(seen.refusal("x"), None);
        assert!(seen.refusal("r0-a-hub").is_some());
        // Who means the connection of another does not even see its own secret proved.
        assert!(meet(&site_b, &hub, "r0-a-hub", &configured).is_err());
        assert!(meet(&site_a, &hub, "r0-b-hub", &configured).is_err());
        // The hub dials each with its own, and nobody for what has none.
        let at_site = ["r0-b-hub"];
        assert!(meet(&hub, &site_b, "r0-b-hub", &at_site).is_ok());
        assert!(meet(&hub, &site_a, "r0-b-hub", &at_site).is_err());
        let none = meet(&hub, &site_a, "other", &["other"]).unwrap_err();
        assert!(
            none.to_string()
                .contains("no secret is for connection other")
        );
        // Translated addresses: the only connection on that port is meant.
        assert!(meet(&site_b, &hub, "elsewhere", &["r0-b-hub"]).is_ok());
        // A lone secret may have a list as well; several must.
        let held = Tls::from_secrets(&[secret(b'a', Some("r1"))]).unwrap();
        let [_, seen] = handshake(&site_a, &held).unwrap();
        assert!(seen.refusal("r0").is_some() && seen.refusal("r1").is_none());
        let vague = [secret(b'a', None), secret(b'b', Some("*"))];
        let vague = Tls::from_secrets(&vague).unwrap_err();
        assert!(vague.contains("with several secrets"), "{vague}");
        assert!(Tls::from_secrets(&[]).is_err());
    }

    #[test]
    fn only_pinned_keys_are_let_in() {
        let (a, b, c) = ([1; 32], [2; 32], [3; 32]);
        let public = |seed| public_of(seed).unwrap();
        let end_a = Tls::from_keys(&hex(&a), &[public(&b)]).unwrap();
        let lists = [public(&c) + "=*", public(&a) + "=r1,web-*"];
        let end_b = Tls::from_keys(&hex(&b), &lists).unwrap();
        let end_c = Tls::from_keys(&hex(&c), &[public(&a)]).unwrap();
        let [b_seen, a_seen] = handshake(&end_a, &end_b).unwrap();
        assert_eq!(b_seen.refusal("r0"), None);
        assert!(a_seen.refusal("r0").is_some());
        assert_eq!(a_seen.refusal("web-2"), None);
        // Both ends have the same value, and each TLS connection another one.
        assert_eq!(a_seen.binding, b_seen.binding);
        let [a_seen, _] = handshake(&end_b, &end_a).unwrap();
        assert!(a_seen.refusal("r0").is_some());
        assert_ne!(a_seen.binding, b_seen.binding);
        assert!(handshake(&end_c, &end_a).is_err());
        assert!(Tls::from_keys(&hex(&a), &[]).is_err());
        let vague = Tls::from_keys(&hex(&a), &[public(&b), public(&c) + "=*"]).unwrap_err();
        assert!(vague.contains("with several peers"), "{vague}");
        assert!(Tls::from_keys("xy", &[public(&b)]).is_err());
        assert!(Tls::from_keys(&hex(&a), &["00".into()]).is_err());
    }
}
