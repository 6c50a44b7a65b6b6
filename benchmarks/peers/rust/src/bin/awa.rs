//! awa as its own benchmark uses it: inserts by COPY, a hundred workers, a poll each 50 ms.

use std::time::Duration;

use awa::{Client, InsertOpts, JobArgs, JobError, JobResult, QueueConfig};
use serde::{Deserialize, Serialize};
use sqlx08::postgres::PgPoolOptions;

const QUEUE: &str = "bench";

#[derive(Serialize, Deserialize, JobArgs)]
struct Send {
    text: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let pool = PgPoolOptions::new()
        .max_connections(20)
        .connect(&std::env::var("DATABASE_URL")?)
        .await?;
    match arguments.next().as_deref() {
        Some("prepare") => {
            let count: usize = arguments.next().unwrap_or_default().parse()?;
            awa::migrations::run(&pool).await?;
            let text = "x".repeat(arguments.next().unwrap_or_default().parse()?);
            let options = || InsertOpts {
                queue: QUEUE.to_owned(),
                ..InsertOpts::default()
            };
            let job = awa::awa_model::insert::params_with(&Send { text }, options())?;
            for chunk in vec![job; count].chunks(1_000) {
                awa::insert_many_copy_from_pool(&pool, chunk).await?;
            }
        }
        _ => {
            let url = std::env::var("RECEIVER_URL")?;
            let http = reqwest::Client::new();
            let client = Client::builder(pool)
                .queue(
                    QUEUE,
                    QueueConfig {
                        max_workers: 100,
                        poll_interval: Duration::from_millis(50),
                        ..QueueConfig::default()
                    },
                )
                .register::<Send, _, _>(move |args, _| {
                    let request = http.post(&url).body(args.text);
                    async move {
                        let answer = request.send().await.map_err(JobError::retryable)?;
                        answer.error_for_status().map_err(JobError::retryable)?;
                        Ok(JobResult::Completed)
                    }
                })
                .build()?;
            client.start().await?;
            std::future::pending::<()>().await;
        }
    }
    Ok(())
}
