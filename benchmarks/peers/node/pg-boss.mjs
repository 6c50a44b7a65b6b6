// pg-boss with batches of 1,000 jobs, fetched without a pause while they are full, and acknowledged together.
import { PgBoss } from 'pg-boss';

const [command, count, bytes] = process.argv.slice(2);
const boss = new PgBoss({ connectionString: process.env.DATABASE_URL, max: 10 });
await boss.start();
await boss.createQueue('bench');
if (command === 'prepare') {
  const text = 'x'.repeat(Number(bytes));
  for (let left = Number(count); left > 0; left -= 1000) {
    await boss.insert('bench', Array.from({ length: Math.min(left, 1000) }, () => ({ data: { text } })));
  }
  await boss.stop();
} else {
  const { post } = await import('./post.mjs');
  const options = { batchSize: 1000, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true, localConcurrency: 2 };
  await boss.work('bench', options, (jobs) => Promise.all(jobs.map((job) => post(job.data.text))));
}
