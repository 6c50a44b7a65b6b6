// pg-boss with batches of 1,000 jobs, fetched without a pause while they are full, and acknowledged together. With keys,
// jobs are fetched one at a time, because a batch never has two of a key, and would not be full.
import { PgBoss } from 'pg-boss';
import { inThousands, isKeyed, key, shape } from './shape.mjs';

const [command, count, bytes] = process.argv.slice(2);
const boss = new PgBoss({ connectionString: process.env.DATABASE_URL, max: 10 });
await boss.start();
await boss.createQueue('bench', { policy: isKeyed ? 'key_strict_fifo' : 'standard' });
if (command === 'prepare') {
  const text = 'x'.repeat(Number(bytes));
  await inThousands(Number(count), (numbers) =>
    boss.insert('bench', numbers.map((n) => ({ data: { text }, singletonKey: key(n) }))),
  );
  await boss.stop();
} else {
  const { post } = await import('./post.mjs');
  const size = isKeyed ? { batchSize: 1, localConcurrency: 16 } : { batchSize: 1000, localConcurrency: 2 };
  const together = shape === 'batched' ? 50 : 1;
  await boss.work('bench', { ...size, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true }, (jobs) => {
    const posts = [];
    for (let first = 0; first < jobs.length; first += together) {
      const texts = jobs.slice(first, first + together).map((job) => job.data.text);
      posts.push(post(together === 1 ? texts[0] : JSON.stringify(texts)));
    }
    return Promise.all(posts);
  });
}
