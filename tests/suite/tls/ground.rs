//! Shared by the TLS tests: an authority that signs certificates, and receivers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use diesel_outbox::Destination;
use diesel_outbox::config::Roots;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    RootCertStore, ServerConfig, ServerConnection, StreamOwned, SupportedProtocolVersion,
};

/// A folder with an authority that signs certificates, removed when dropped.
pub(super) struct Authority {
    folder: PathBuf,
}

impl Authority {
    pub(super) fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("outbox-tls-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir(&folder).expect("a folder");
        let authority = Self { folder };
        authority.openssl(&format!(
            "req -x509 -days 2 -subj /CN=authority {NEW_KEY}ca.key -out ca.pem"
        ));
        authority.sign("server", "subjectAltName=DNS:localhost,IP:127.0.0.1");
        authority
    }

    /// Makes `<name>.key` and `<name>.pem`.
    pub(super) fn sign(&self, name: &str, extension: &str) {
        let extensions = format!("basicConstraints=CA:FALSE\n{extension}\n");
        self.write(&format!("{name}.ext"), extensions.as_bytes());
        self.openssl(&format!(
            "req -subj /CN={name} {NEW_KEY}{name}.key -out {name}.csr"
        ));
        self.openssl(&format!(
            "x509 -req -days 2 -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile {name}.ext -out {name}.pem"
        ));
    }

    /// Makes a certificate for a subject that signs itself, with openssl's defaults and these options.
    pub(super) fn sign_itself(&self, name: &str, subject: &str, options: &str) {
        self.openssl(&format!(
            "req -x509 -subj {subject} {NEW_KEY}{name}.key -out {name}.pem{options}"
        ));
    }

    /// The same with an extension, valid for some days from now.
    pub(super) fn sign_itself_for(&self, name: &str, subject: &str, extension: &str, days: u32) {
        let extensions = format!("basicConstraints=CA:TRUE\n{extension}\n");
        self.write(&format!("{name}.ext"), extensions.as_bytes());
        self.openssl(&format!(
            "req -subj {subject} {NEW_KEY}{name}.key -out {name}.csr"
        ));
        self.openssl(&format!(
            "x509 -req -days {days} -in {name}.csr -signkey {name}.key -extfile {name}.ext -out {name}.pem"
        ));
    }

    pub(super) fn openssl(&self, arguments: &str) {
        let output = Command::new("openssl")
            .args(arguments.split(' '))
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .output()
            .expect("openssl is there: `make test` installs it");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "openssl {arguments}: {stderr}");
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    pub(super) fn write(&self, file: &str, content: &[u8]) -> PathBuf {
        let path = self.path(file);
        std::fs::write(&path, content).expect("our folder");
        path
    }

    pub(super) fn read(&self, file: &str) -> Vec<u8> {
        std::fs::read(self.path(file)).expect("our file")
    }

    /// A destination at this port that trusts the authority.
    pub(super) fn trusting(&self, port: u16) -> Destination {
        let mut destination = destination(port);
        destination.tls.roots = Some(Roots::File(self.path("ca.pem")));
        destination
    }

    /// Like [`trusting`](Self::trusting), and presents the certificate `name`.
    pub(super) fn known_as(&self, name: &str, port: u16) -> Destination {
        self.sign(name, "extendedKeyUsage=clientAuth");
        let mut destination = self.trusting(port);
        destination.tls.client_cert_file = Some(self.path(&format!("{name}.pem")));
        destination.tls.client_key_file = Some(self.path(&format!("{name}.key")));
        destination
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ";

pub(super) fn destination(port: u16) -> Destination {
    Destination::new("billing", &format!("https://localhost:{port}/events")).expect("a URL")
}

/// The largest body that a receiver reads.
const LARGEST: usize = 1_000_000;

/// A TLS receiver that responds to every request with 200, but to a large one with 413 before it reads the body.
pub(super) struct TlsReceiver {
    pub(super) port: u16,
    delivered: Arc<AtomicUsize>,
    /// The number of handshakes that resumed an earlier session.
    resumed: Arc<AtomicUsize>,
}

pub(super) enum Clients {
    Anybody,
    Known,
}

impl TlsReceiver {
    pub(super) fn start(
        authority: &Authority,
        versions: &[&'static SupportedProtocolVersion],
        clients: Clients,
    ) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let read = |file: &str| authority.path(file);
        let chain = CertificateDer::from_pem_file(read("server.pem")).expect("a certificate");
        let key = PrivateKeyDer::from_pem_file(read("server.key")).expect("a key");
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(read("ca.pem")).expect("a certificate"))
            .expect("a root");
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .expect("versions");
        let builder = match clients {
            Clients::Anybody => builder.with_no_client_auth(),
            Clients::Known => builder.with_client_cert_verifier(
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .build()
                    .expect("a verifier"),
            ),
        };
        let config = Arc::new(builder.with_single_cert(vec![chain], key).expect("a pair"));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let receiver = Self {
            port: listener.local_addr().expect("an address").port(),
            delivered: Arc::default(),
            resumed: Arc::default(),
        };
        let delivered = Arc::clone(&receiver.delivered);
        let resumed = Arc::clone(&receiver.resumed);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let config = Arc::clone(&config);
                let (delivered, resumed) = (Arc::clone(&delivered), Arc::clone(&resumed));
                std::thread::spawn(move || {
                    let connection = ServerConnection::new(config).expect("a connection");
                    let mut stream = BufReader::new(StreamOwned::new(connection, stream));
                    while let Some(length) = read_head(&mut stream) {
                        if length > LARGEST {
                            let answer = b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n";
                            let tls = stream.get_mut();
                            if tls.write_all(answer).and_then(|()| tls.flush()).is_ok() {
                                // Keeps the connection and reads nothing.
                                std::thread::park();
                            }
                            return;
                        }
                        if stream.read_exact(&mut vec![0; length]).is_err() {
                            return;
                        }
                        delivered.fetch_add(1, Ordering::SeqCst);
                        let tls = stream.get_mut();
                        if tls.conn.handshake_kind() == Some(rustls::HandshakeKind::Resumed) {
                            resumed.fetch_add(1, Ordering::SeqCst);
                        }
                        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                        if tls.write_all(answer).and_then(|()| tls.flush()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        receiver
    }

    pub(super) fn delivered(&self) -> usize {
        self.delivered.load(Ordering::SeqCst)
    }

    pub(super) fn resumed(&self) -> usize {
        self.resumed.load(Ordering::SeqCst)
    }
}

/// Reads the head of a request. Returns the length of its body, or `None` if the client sends no request.
fn read_head(stream: &mut impl BufRead) -> Option<usize> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            return Some(length);
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().expect("a length");
        }
    }
}

pub(super) const BOTH: &[&SupportedProtocolVersion] = rustls::ALL_VERSIONS;
pub(super) const ONLY_1_2: &[&SupportedProtocolVersion] = &[&rustls::version::TLS12];
pub(super) const ONLY_1_3: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// `openssl s_server`, killed when dropped.
pub(super) struct OpensslServer {
    server: Child,
    pub(super) port: u16,
}

impl OpensslServer {
    pub(super) fn start(authority: &Authority, version: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a port")
            .port();
        let mut server = Command::new("openssl")
            .args(["s_server", "-www", version, "-accept", &port.to_string()])
            .args(["-key", "server.key", "-cert", "server.pem"])
            .current_dir(&authority.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl runs");
        let stdout = server.stdout.take().expect("piped");
        let accepts = BufReader::new(stdout)
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("ACCEPT"));
        assert!(accepts, "openssl listens on {port}");
        Self { server, port }
    }
}

impl Drop for OpensslServer {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
