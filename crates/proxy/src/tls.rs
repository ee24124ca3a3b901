//! Encryption and identity of carriers: TLS 1.3 with mutual authentication by a shared secret, by
//! pinned keys or by certificates of a private authority.

use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, WebPkiServerVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer,
    UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, Error, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
};
use sha2::Sha256;

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
    /// Name in the peer's certificate, where certificates are used.
    peer_name: Option<ServerName<'static>>,
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
        let pins = peers
            .iter()
            .map(|peer| {
                unhex(peer.trim())
                    .filter(|bytes| bytes.len() == 44)
                    .ok_or(format!("peer key '{peer}' must be 88 hex digits"))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let key = raw_key(&seed)?;
        Tls::from_raw(key.clone(), pins.clone(), key, pins)
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
            peer_name: None,
        })
    }

    /// Certificates: own chain and key, and the authority that both ends trust. The peer's
    /// certificate must name `peer_name`, or the address that is dialled.
    pub(crate) fn from_files(
        cert: &Path,
        key: &Path,
        authority: &Path,
        peer_name: Option<&str>,
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
        let peer_name = peer_name
            .map(|name| ServerName::try_from(name.to_string()))
            .transpose()
            .map_err(|_| "--peer-name is neither a host name nor an address".to_string())?;
        Ok(Tls {
            client: Arc::new(client),
            server: Arc::new(server),
            peer_name,
        })
    }

    /// The dialling end of a carrier.
    pub(crate) fn dial(&self, peer: std::net::IpAddr) -> Result<Connection, Error> {
        let name = self
            .peer_name
            .clone()
            .unwrap_or(ServerName::IpAddress(peer.into()));
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
    fn handshake(dialer: &Tls, listener: &Tls) -> Result<(), Error> {
        let mut client = dialer.dial([127, 0, 0, 1].into())?;
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
        Ok(())
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
        let end_b = Tls::from_keys(&hex(&b), &[public(&c), public(&a)]).unwrap();
        let end_c = Tls::from_keys(&hex(&c), &[public(&a)]).unwrap();
        assert!(handshake(&end_a, &end_b).is_ok());
        assert!(handshake(&end_b, &end_a).is_ok());
        assert!(handshake(&end_c, &end_a).is_err());
        assert!(Tls::from_keys(&hex(&a), &[]).is_err());
        assert!(Tls::from_keys("xy", &[public(&b)]).is_err());
        assert!(Tls::from_keys(&hex(&a), &["00".into()]).is_err());
    }
}
