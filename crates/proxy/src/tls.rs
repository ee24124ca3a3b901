//! Encryption and identity of carriers: TLS 1.3 with mutual authentication by a shared secret, by
//! pinned keys or by certificates of a private authority.

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
use rustls::server::{AlwaysResolvesServerRawPublicKeys, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, Error, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
};
use sha2::Sha256;

use crate::core::identity::{Names, Peer};

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
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    /// Who is known by name or key, with the connections that each may use.
    peers: Vec<KnownPeer>,
}

#[derive(Clone)]
struct KnownPeer {
    who: Who,
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
        return Err(format!(
            "with several peers each needs the list of connections that it may use, such as \
             {option} ...=r0-bob-alice,web-* (or =* for all)"
        ));
    }
    Ok(())
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Both ends hold the same secret. Each role has a key pair derived from it, so a proof by one
    /// role cannot be played back to the other, and nothing of the secret is sent.
    pub(crate) fn from_secret(secret: &[u8]) -> Result<Tls, String> {
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
        let dialer = raw_key(&seed(b"dialer"))?;
        let listener = raw_key(&seed(b"listener"))?;
        let pins = |key: &CertifiedKey| vec![key.cert[0].to_vec()];
        Tls::from_raw(dialer.clone(), pins(&listener), listener, pins(&dialer))
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
            let who = Who::Key(key);
            known.push(KnownPeer { who, may_use });
        }
        check_lists("--peer-key", &known)?;
        let key = raw_key(&seed)?;
        let mut tls = Tls::from_raw(key.clone(), pins.clone(), key, pins)?;
        tls.peers = known;
        Ok(tls)
    }

    fn from_raw(
        client_key: CertifiedKey,
        client_pins: Vec<Vec<u8>>,
        server_key: CertifiedKey,
        server_pins: Vec<Vec<u8>>,
    ) -> Result<Tls, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let algorithms = provider.signature_verification_algorithms;
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| error.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Pinned {
                keys: client_pins,
                algorithms,
            }))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::new(
                client_key,
            ))));
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| error.to_string())?
            .with_client_cert_verifier(Arc::new(Pinned {
                keys: server_pins,
                algorithms,
            }))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(
                server_key,
            ))));
        Ok(Tls {
            client: Arc::new(client),
            server: Arc::new(server),
            peers: Vec::new(),
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
            let name = ServerName::try_from(name.to_string()).map_err(|_| {
                format!("--peer-name '{name}' is neither a host name nor an address")
            })?;
            let who = Who::Name(name);
            peers.push(KnownPeer { who, may_use });
        }
        check_lists("--peer-name", &peers)?;
        Ok(Tls {
            client: Arc::new(client),
            server: Arc::new(server),
            peers,
        })
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
        for known in self.peers.iter().filter(is_peer) {
            may_use = match (&may_use, &known.may_use) {
                (Some(names), Some(more)) => Some(names.and(more)),
                _ => None,
            };
        }
        Peer { binding, may_use }
    }

    /// The dialling end of a carrier for a connection of this name.
    pub(crate) fn dial(
        &self,
        peer: std::net::IpAddr,
        connection: &str,
    ) -> Result<Connection, Error> {
        let named = self.peers.iter().find_map(|known| match &known.who {
            Who::Name(name) => {
                let names = known.may_use.as_ref();
                names
                    .is_none_or(|names| names.has(connection))
                    .then_some(name)
            }
            Who::Key(_) => None,
        });
        let name = named.cloned().unwrap_or(ServerName::IpAddress(peer.into()));
        Ok(ClientConnection::new(Arc::clone(&self.client), name)?.into())
    }

    /// The accepting end of a carrier.
    pub(crate) fn accept(&self) -> Result<Connection, Error> {
        Ok(ServerConnection::new(Arc::clone(&self.server))?.into())
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
        let mut client = dialer.dial([127, 0, 0, 1].into(), "r0")?;
        let mut server = listener.accept()?;
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
        let a = Tls::from_secret(b"0123456789abcdef0123456789abcdef\n").unwrap();
        let b = Tls::from_secret(b"0123456789abcdef0123456789abcdef").unwrap();
        let wrong = Tls::from_secret(b"0123456789abcdef0123456789abcdeX").unwrap();
        assert!(handshake(&a, &b).is_ok());
        assert!(handshake(&a, &wrong).is_err());
        assert!(handshake(&wrong, &a).is_err());
        let short = Tls::from_secret(b"secret").unwrap_err();
        assert!(short.contains("at least 16"), "{short}");
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
