// SPDX-License-Identifier: Apache-2.0
// What each session held, as this page has seen it: the daemon keeps a history of devices alone.

const PERIOD_MS = 2000;  // as the daemon's timeline
const LENGTH_MS = 900_000;
const GAP_MS = 10_000;   // nobody looked: drawn as a gap

const opened = Date.now();
const histories = new Map();  // by session and device; in columns, as the API's timeline
let last = 0;

const keyOf = (id, device) => `${id} ${device}`;
const none = () =>
  ({time_ms: [], allocated_bytes: [], leased_bytes: [], inactive_split_bytes: [], reclaimable_bytes: [],
    refusals: [], waiting: []});

function add(history, sample) {
  for (const [name, column] of Object.entries(history)) column.push(sample[name] ?? null);
}

function rememberOne(history, now, held) {
  const before = history.time_ms.at(-1);
  // A clock that was set back would draw its line back.
  if (before >= now) Object.assign(history, none());
  if (before < now - GAP_MS) add(history, {time_ms: now - 1});
  add(history, {time_ms: now, allocated_bytes: held.allocated_bytes, leased_bytes: held.reserved_bytes,
    inactive_split_bytes: held.inactive_split_bytes, reclaimable_bytes: held.idle_bytes, refusals: held.num_ooms,
    waiting: held.waiting.length});
}

export function remember(sessions) {
  const now = Date.now();
  if (now >= last && now - last < PERIOD_MS - 100) return;
  last = now;
  for (const session of sessions) {
    session.devices.forEach((held, device) => {
      const key = keyOf(session.id, device);
      if (!histories.has(key)) histories.set(key, none());
      rememberOne(histories.get(key), now, held);
    });
  }
  for (const [key, history] of histories) {
    const old = history.time_ms.findIndex((time) => time >= now - LENGTH_MS);
    if (old < 0) histories.delete(key);
    if (old > 0) Object.values(history).forEach((column) => column.splice(0, old));
  }
}

export function historyOf(id, device) {
  return {...(histories.get(keyOf(id, device)) ?? none()), since: Math.max(opened, Date.now() - LENGTH_MS)};
}
