//! The admin pages of two processes behind one address of a real nginx.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::commands::With;
use crate::page::{Answer, Page, TOKEN};
use crate::support::{Database, eventually};

/// The program may be outside the user's search path.
const PROGRAMS: &[&str] = &["nginx", "/usr/sbin/nginx"];

struct Nginx {
    process: Child,
    folder: PathBuf,
    address: SocketAddr,
}

impl Nginx {
    /// With the addresses of the processes, and what it does with a request.
    fn start(pages: &[Page], location: &str) -> Self {
        let address = TcpListener::bind("127.0.0.1:0")
            .and_then(|free| free.local_addr())
            .expect("a port");
        let folder = std::env::temp_dir().join(format!("outbox-nginx-{}", address.port()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let servers = pages.iter().map(|page| format!("server {};", page.address));
        let settings = format!(
            "master_process off; daemon off; pid pid; error_log error.log; events {{}}
             http {{
                 access_log off; keepalive_timeout 0;
                 client_body_temp_path body; proxy_temp_path proxy;
                 fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
                 upstream pages {{ {} }}
                 server {{
                     listen {address};
                     proxy_set_header Host $http_host;
                     proxy_ignore_client_abort on;
                     add_header x-process $upstream_addr always;
                     {location}
                 }}
             }}",
            servers.collect::<String>()
        );
        let file = folder.join("nginx.conf");
        std::fs::write(&file, settings).expect("written");
        let process = PROGRAMS.iter().find_map(|program| {
            let mut command = Command::new(program);
            command.arg("-p").arg(&folder).arg("-c").arg(&file);
            command
                .args(["-e", "error.log"])
                .stdin(Stdio::null())
                .spawn()
                .ok()
        });
        let process = process
            .expect("nginx is installed: run `make test`, or `scripts/install-package nginx`");
        let nginx = Self {
            process,
            folder,
            address,
        };
        eventually("nginx listens", || TcpStream::connect(address).is_ok());
        nginx
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// R60: an operator logs in once and works at two processes, which have the requests in turn: at the root of an address,
/// below a path, and below a path that the proxy removes.
#[test]
fn two_processes_behind_nginx_are_one_page_with_and_without_a_prefix() {
    for (base, location) in [
        ("", "location / { proxy_pass http://pages; }"),
        (
            "/ops/outbox",
            "location /ops/outbox { proxy_pass http://pages; }",
        ),
        (
            "/ops/outbox",
            "location /ops/outbox/ { proxy_pass http://pages/; }",
        ),
    ] {
        let database = Database::new();
        database.enqueue("order.paid", serde_json::json!(1));
        let start = || {
            let command = database.binary(&["admin"]);
            let command = command.with("OUTBOX_ADMIN_TOKEN", TOKEN);
            Page::start(command.with("OUTBOX_ADMIN_BASE", base))
        };
        let mut pages = [start(), start()];
        let nginx = Nginx::start(&pages, location);
        // What follows asks nginx.
        let [front, _other] = &mut pages;
        front.address = nginx.address;
        let login = front.post(
            &format!("{base}/login"),
            "",
            &format!("token={TOKEN}&name=ann"),
        );
        let home = format!("{base}/");
        assert_eq!(login.header("location"), Some(home.as_str()), "{login:?}");
        let cookie = login.cookie().to_owned();
        let by = |answer: &Answer| answer.header("x-process").expect("a process").to_owned();
        let (mut read, mut changed) = (BTreeSet::new(), BTreeSet::new());
        for round in 0..6 {
            let path = format!("GET {home}");
            let seen = front.request(&path, &[&format!("cookie: {cookie}")], "");
            assert_eq!(seen.status, 200, "{seen:?}");
            read.insert(by(&seen));
            let (act, rest) = match round % 2 {
                0 => ("pause", "&reason=stop"),
                _ => ("resume", ""),
            };
            let form = format!(
                "form_token={}&kind=topic&name=order.paid{rest}",
                seen.form_token()
            );
            let done = front.post(&format!("{base}/{act}"), &cookie, &form);
            assert_eq!(done.status, 303, "{done:?}");
            let back = done.header("location").expect("a location");
            assert!(back.starts_with(&home), "{back}");
            changed.insert(by(&done));
            assert_eq!(
                database.number("SELECT count(*) FROM {o}_pause"),
                1 - round % 2
            );
            // One more, so that each process has reads and changes.
            if round == 2 {
                front.get(&home);
            }
        }
        assert_eq!((read.len(), changed.len()), (2, 2), "{location}");
    }
}
