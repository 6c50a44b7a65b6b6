//! Kills the relay and Redis while messages are in flight: none is lost, and the order of each key holds.

mod ground;

use std::collections::HashMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

use ground::{Database, Process, eventually, repeats};

/// A folder and a port for a Redis that is started again and again.
struct Redis {
    folder: PathBuf,
    url: String,
    port: u16,
}

impl Redis {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("outbox-redis-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = free.local_addr().expect("an address").port();
        let url = format!("redis://127.0.0.1:{port}/");
        Self { folder, url, port }
    }

    fn start(&self) -> Process {
        let mut server = Command::new("redis-server");
        server.args([
            "--port",
            &self.port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ]);
        server.args(["--appendonly", "yes", "--appendfsync", "always", "--dir"]);
        let server = Process::start(server.arg(&self.folder));
        eventually("Redis answers", || self.ask::<String>(&["PING"]).is_some());
        server
    }

    fn ask<T: redis::FromRedisValue>(&self, words: &[&str]) -> Option<T> {
        let client = redis::Client::open(self.url.as_str()).expect("a URL");
        let mut connection = client.get_connection().ok()?;
        let mut command = redis::cmd(words[0]);
        words[1..].iter().for_each(|word| {
            command.arg(word);
        });
        command.query(&mut connection).ok()
    }

    fn length(&self) -> usize {
        self.ask(&["XLEN", "outbox"]).unwrap_or(0)
    }

    fn arrived(&self) -> Vec<(String, usize)> {
        let entries: Vec<(String, HashMap<String, String>)> =
            self.ask(&["XRANGE", "outbox", "-", "+"]).expect("entries");
        let of = |(_, mut entry): (String, HashMap<String, String>)| {
            let number = entry["payload"].parse().expect("a number");
            (entry.remove("key").expect("a key"), number)
        };
        entries.into_iter().map(of).collect()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn nothing_is_lost_and_keys_keep_their_order_when_relay_and_redis_are_killed() {
    const ALL: usize = 12_000;
    let (database, redis) = (Database::new("redis"), Redis::new());
    let mut server = redis.start();
    let relay = || {
        let mut relay = Command::new(env!("CARGO_BIN_EXE_redis-streams"));
        relay.env("REDIS_URL", &redis.url);
        Process::relay(relay, &database)
    };
    let mut running = relay();
    for round in 0..3 {
        database.enqueue(round * ALL / 3..(round + 1) * ALL / 3);
        let begin = redis.length();
        eventually("the relay is sending", || redis.length() > begin + 100);
        server.kill();
        server = redis.start();
        let begin = redis.length();
        eventually("the relay is sending again", || {
            redis.length() > begin + 100
        });
        running.kill();
        assert!(
            database.delivered() < (round + 1) * ALL / 3,
            "the kill came while messages were in flight"
        );
        running = relay();
    }
    eventually("all are delivered", || database.delivered() == ALL);
    drop(running);
    let repeats = repeats(&redis.arrived(), ALL);
    println!("{ALL} messages, {repeats} of them twice");
    drop(server);
}
