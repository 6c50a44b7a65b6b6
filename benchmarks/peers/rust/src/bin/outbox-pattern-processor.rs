//! outbox-pattern-processor with a larger query limit than its default of 50, and rows deleted when they are sent.

use outbox_pattern_processor::outbox_processor::OutboxProcessor;
use outbox_pattern_processor::outbox_resources::OutboxProcessorResources;
use sqlx09::postgres::PgPoolOptions;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let pool = PgPoolOptions::new()
        .max_connections(20)
        .connect(&std::env::var("DATABASE_URL")?)
        .await?;
    let resources = OutboxProcessorResources::new(pool, None, None)
        .with_outbox_query_limit(1_000)
        .with_outbox_execution_interval_in_seconds(1)
        .with_delete_after_process_successfully(true);
    OutboxProcessor::new(resources)
        .init_process()
        .await
        .map_err(|error| anyhow::anyhow!("{error}"))
}
