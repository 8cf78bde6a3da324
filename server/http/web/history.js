// SPDX-License-Identifier: Apache-2.0
// What each session held since the page was opened, whatever the page shows meanwhile: the daemon keeps a history of
// devices alone.

const PERIOD_MS = 2000;      // as the daemon's timeline
const ENDED_MS = 900_000;    // how long the history of a session that has ended is kept
const MOST_ENDED = 200;
// Of all histories together, about 50 bytes each; a history has its share of them, within bounds.
const MOST_SAMPLES = 100_000;
const MOST_OF_ONE = 450;
const LEAST_OF_ONE = 64;

const opened = Date.now();
const histories = new Map();  // by run of the daemon, session and device
let last = 0;                 // when the last samples were taken

const keyOf = (run, id, device) => `${run} ${id} ${device}`;
// In columns, as the API's timeline. A gap is a sample without figures, which says how long nobody had looked.
const none = () =>
  ({time_ms: [], allocated_bytes: [], leased_bytes: [], inactive_split_bytes: [], reclaimable_bytes: [],
    refusals: [], waiting: [], unseen_ms: []});

function add(columns, sample) {
  for (const [name, column] of Object.entries(columns)) column.push(sample[name] ?? null);
}

function rememberOne(history, now, held, gap) {
  const before = history.columns.time_ms.at(-1);
  // A clock that was set back would draw its line back.
  if (before >= now) Object.assign(history, {columns: none(), step: PERIOD_MS});
  if (before < now - gap) add(history.columns, {time_ms: now - 1, unseen_ms: now - before});
  add(history.columns, {time_ms: now, allocated_bytes: held.allocated_bytes, leased_bytes: held.reserved_bytes,
    inactive_split_bytes: held.inactive_split_bytes, reclaimable_bytes: held.idle_bytes, refusals: held.num_ooms,
    waiting: held.waiting.length});
}

// What stands for the samples from `begin` to `end`, which are within `step` ms: the one that held most, or a gap that is
// longer than that.
function merged(columns, begin, end, step) {
  const {time_ms: times, leased_bytes: leased, unseen_ms: unseen} = columns;
  let most = begin;
  for (let i = begin; i < end; ++i) {
    if (unseen[i] >= step) return {time_ms: times[i], unseen_ms: unseen[i]};
    if (leased[i] !== null && (leased[most] === null || leased[i] > leased[most])) most = i;
  }
  const of = (name) => columns[name].slice(begin, end).filter((value) => value !== null);
  const sample = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[most]]));
  if (sample.unseen_ms !== null) return sample;
  return {...sample, refusals: of('refusals').at(-1), waiting: Math.max(...of('waiting'))};
}

// The older ones of the samples, one of each `step` ms; the newest `whole` as they are.
function thinned(columns, step, whole) {
  const {time_ms: times} = columns;
  const result = none();
  const end = times.length - whole;
  for (let begin = 0; begin < end;) {
    let next = begin + 1;
    while (next < end && times[next] - times[begin] < step) ++next;
    add(result, merged(columns, begin, next, step));
    begin = next;
  }
  for (const [name, column] of Object.entries(result)) column.push(...columns[name].slice(end));
  return result;
}

// Leaves room for more, so that this is seldom.
function thin(history, most) {
  if (history.columns.time_ms.length <= most) return;
  while (history.columns.time_ms.length > 0.75 * most) {
    history.columns = thinned(history.columns, history.step, Math.floor(most / 4));
    if (history.columns.time_ms.length > 0.75 * most) history.step *= 2;
  }
}

function forgetEnded(now) {
  const ended = [...histories].filter(([, {seen}]) => seen < now).sort(([, a], [, b]) => b.seen - a.seen);
  ended.forEach(([key, {seen}], i) => {
    if (i >= MOST_ENDED || seen < now - ENDED_MS) histories.delete(key);
  });
}

// `run`: of the daemon. `gap`: between samples that are further apart, nobody looked: drawn as a gap. `now`: ms since 1970.
export function remember(run, sessions, gap, now = Date.now()) {
  if (now >= last && now - last < PERIOD_MS - 100) return;
  last = now;
  for (const session of sessions) {
    session.devices.forEach((held, device) => {
      const key = keyOf(run, session.id, device);
      if (!histories.has(key)) histories.set(key, {columns: none(), step: PERIOD_MS});
      const history = histories.get(key);
      history.seen = now;
      rememberOne(history, now, held, gap);
    });
  }
  forgetEnded(now);
  const share = Math.floor(MOST_SAMPLES / Math.max(1, histories.size));
  const most = Math.min(MOST_OF_ONE, Math.max(LEAST_OF_ONE, share));
  for (const history of histories.values()) thin(history, most);
}

export function historyOf(run, id, device) {
  return {...(histories.get(keyOf(run, id, device))?.columns ?? none()), since: opened};
}

// How many samples there are in all.
export function remembered() {
  return [...histories.values()].reduce((sum, {columns}) => sum + columns.time_ms.length, 0);
}
