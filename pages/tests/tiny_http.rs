//! The example serves the pages over real sockets.

#[path = "../examples/tiny_http.rs"]
#[allow(dead_code, reason = "its main function reads the environment")]
mod example;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use diesel_outbox::config::Config;
use diesel_outbox_pages::Pages;
use tiny_http::Server;

/// The whole response to GET.
fn get(address: SocketAddr, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("a response");
    response
}

/// R60
#[test]
fn an_application_serves_the_pages_behind_its_own_login() {
    let none = || Err::<Box<diesel::PgConnection>, _>("no database in this test");
    let pages = Pages::operators(&Config::default(), none, None).expect("pages");
    let pages = pages.base("/admin/outbox").expect("a path");
    let server = Server::http("127.0.0.1:0").expect("a port");
    let address = server.server_addr().to_ip().expect("an address");
    std::thread::scope(|threads| {
        let serving = threads.spawn(|| example::serve(&server, &pages, "Basic x"));
        let refused = get(address, "/admin/outbox", "");
        assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
        let style = "/admin/outbox/assets/style.css";
        let page = get(address, "/admin/outbox", "authorization: Basic x\r\n");
        assert!(page.contains(style), "{page}");
        assert!(page.contains("no database in this test"), "{page}");
        let style = get(address, style, "authorization: Basic x\r\n");
        assert!(style.starts_with("HTTP/1.1 200"), "{style}");
        server.unblock();
        serving.join().expect("no panic");
    });
}
