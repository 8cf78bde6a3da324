// SPDX-License-Identifier: Apache-2.0
// What each session held, as this page has seen it: the daemon keeps a history of devices alone.

const PERIOD_MS = 2000;  // as the daemon's timeline
const LENGTH_MS = 900_000;
const GAP_MS = 10_000;   // nobody looked: drawn as a gap

const opened = Date.now();
const histories = new Map();  // by session and device
let last = 0;

const keyOf = (id, device) => `${id} ${device}`;

export function remember(sessions) {
  const now = Date.now();
  if (now - last < PERIOD_MS - 100 && now >= last) return;
  last = now;
  for (const session of sessions) {
    session.devices.forEach((held, device) => {
      const key = keyOf(session.id, device);
      if (!histories.has(key)) histories.set(key, []);
      const samples = histories.get(key);
      // A clock that was set back would draw its line back.
      while (samples.length > 0 && samples.at(-1).time_ms >= now) samples.pop();
      if (samples.length > 0 && now - samples.at(-1).time_ms > GAP_MS) samples.push({time_ms: now - 1, held: null});
      samples.push({time_ms: now, held});
    });
  }
  for (const [key, samples] of histories) {
    while (samples.length > 0 && samples[0].time_ms < now - LENGTH_MS) samples.shift();
    if (samples.length === 0) histories.delete(key);
  }
}

// In columns, as the API's timeline.
export function historyOf(id, device) {
  const samples = histories.get(keyOf(id, device)) ?? [];
  const column = (of) => samples.map(({held}) => (held === null ? null : of(held)));
  return {
    since: Math.max(opened, Date.now() - LENGTH_MS),
    time_ms: samples.map((sample) => sample.time_ms),
    allocated_bytes: column((held) => held.allocated_bytes),
    leased_bytes: column((held) => held.reserved_bytes),
    reclaimable_bytes: column((held) => held.idle_bytes),
    refusals: column((held) => held.num_ooms),
    waiting: column((held) => held.waiting.length),
  };
}
