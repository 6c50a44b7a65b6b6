// graphile-worker with a local queue and batched completion, as its page on performance has it.
import { makeWorkerUtils, run } from 'graphile-worker';
import { inThousands } from './shape.mjs';

const [command, count, bytes] = process.argv.slice(2);
const connectionString = process.env.DATABASE_URL;
if (command === 'prepare') {
  const utils = await makeWorkerUtils({ connectionString });
  await utils.migrate();
  const payload = { text: 'x'.repeat(Number(bytes)) };
  await inThousands(Number(count), (numbers) =>
    utils.addJobs(numbers.map(() => ({ identifier: 'send', payload }))),
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
        pollInterval: 500,
        localQueue: { size: 500 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
  });
  await runner.promise;
}
