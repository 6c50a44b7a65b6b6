// graphile-worker with a local queue and batched completion, as its page on performance has it. With keys, which are its
// queues, without these: a local queue gets one job of a queue for each poll. A worker does not wait until its job is
// completed, and so finds the next job of the queue only when it polls: of 500 ms, 10 ms, 5 ms and 1 ms, 5 ms is the best
// for many keys and one.
import { makeWorkerUtils, run } from 'graphile-worker';
import { inThousands, isKeyed, key } from './shape.mjs';

const [command, count, bytes] = process.argv.slice(2);
const connectionString = process.env.DATABASE_URL;
if (command === 'prepare') {
  const utils = await makeWorkerUtils({ connectionString });
  await utils.migrate();
  const payload = { text: 'x'.repeat(Number(bytes)) };
  await inThousands(Number(count), (numbers) =>
    utils.addJobs(numbers.map((n) => ({ identifier: 'send', payload, queueName: key(n) }))),
  );
  await utils.release();
} else {
  const { post } = await import('./post.mjs');
  const runner = await run({
    taskList: { send: ({ text }) => post(text) },
    preset: {
      worker: {
        connectionString,
        concurrentJobs: 24,
        maxPoolSize: 10,
        ...(isKeyed
          ? { pollInterval: 5 }
          : { pollInterval: 500, localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 }),
      },
    },
  });
  await runner.promise;
}
