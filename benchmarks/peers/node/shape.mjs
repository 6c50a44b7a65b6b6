// The kind of work that compare.py asks for.
export const shape = process.env.COMPARE_SHAPE;
export const isKeyed = shape === 'zipf' || shape === 'one-key';

// The ordering key of message n, from 1: the same as in compare.py.
export function key(n) {
  if (!isKeyed) return undefined;
  return shape === 'one-key' ? '1' : String(Math.floor(1000 ** ((n * 0.618033988749895) % 1)));
}

// Calls insert with the numbers of the messages, at most 1,000 at a time.
export async function inThousands(count, insert) {
  for (let first = 1; first <= count; first += 1000) {
    await insert(Array.from({ length: Math.min(count - first + 1, 1000) }, (_, index) => first + index));
  }
}
