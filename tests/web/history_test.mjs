// SPDX-License-Identifier: Apache-2.0
//
// Tests the page's history of sessions, which begins when the page opens and has bounds, and the layout of the map.
// Needs no browser and no daemon.
// Usage: history_test.mjs   (run by run.sh, which puts server/http/web/history.js beside it)
import assert from 'node:assert/strict';
import {clock, day, moment} from './format.mjs';
import {historyOf, remember, remembered} from './history.mjs';
import {groupsOf, layOut} from './map_layout.mjs';

const MIB = 2 ** 20;
const PERIOD_MS = 2000;
const GAP_MS = 10_000;
const MOST = 100_000;  // samples of all sessions together

let now = Date.UTC(2030, 0, 1);
let run = 'a';  // the daemon's run id
const held = (bytes, ooms = 0) => ({allocated_bytes: bytes / 2, reserved_bytes: bytes, idle_bytes: 0, num_ooms: ooms, waiting: []});
const sessions = (count, of = () => held(MIB), first = 1) =>
  Array.from({length: count}, (_, i) => ({id: first + i, devices: [of(first + i)]}));
function look(all, apart = PERIOD_MS) {
  now += apart;
  remember(run, all, GAP_MS, now);
}
const check = (history) => {
  const {time_ms: times} = history;
  for (const name of ['allocated_bytes', 'leased_bytes', 'reclaimable_bytes', 'refusals', 'waiting']) {
    assert.equal(history[name].length, times.length, name);
    // A sample has all figures, or none.
    assert.ok(history[name].every((value, i) => (value === null) === (history.leased_bytes[i] === null)), name);
  }
  assert.ok(times.every((time, i) => i === 0 || time > times[i - 1]));
  return history;
};

// A session's history of a day is bounded, begins with the first sample, and keeps the peak and the refusals.
{
  const begin = now + PERIOD_MS;
  const day = 24 * 3600 * 1000 / PERIOD_MS;
  let longest = 0;
  for (let i = 0; i < day; ++i) {
    look(sessions(1, () => held((i === 1234 ? 900 : 10) * MIB, i < 5000 ? 0 : 3)));
    longest = Math.max(longest, historyOf(run, 1, 0).time_ms.length);
  }
  const history = check(historyOf(run, 1, 0));
  const {time_ms: times} = history;
  assert.ok(longest <= 450, `${longest} samples`);
  assert.ok(times.length >= 200, `${times.length} samples`);
  assert.ok(times[0] - begin <= 24 * 3600 * 1000 / 100, `begins ${times[0] - begin} ms late`);
  assert.equal(Math.max(...history.leased_bytes), 900 * MIB);
  assert.deepEqual([history.refusals[0], history.refusals.at(-1)], [0, 3]);
  // The history keeps all of the newest samples. No two neighbours among the older samples are far apart.
  assert.deepEqual(times.slice(-100), Array.from({length: 100}, (_, i) => now - PERIOD_MS * (99 - i)));
  const apart = Math.max(...times.slice(1).map((time, i) => time - times[i]));
  assert.ok(apart <= 24 * 3600 * 1000 / 50, `${apart} ms apart`);
}

// A long time without samples is a gap, even long ago. The samples between many short gaps stay.
{
  const before = now;
  look(sessions(1), 4 * 3600 * 1000);
  const after = now;
  for (let i = 0; i < 3000; ++i) look(sessions(1), i % 3 === 0 ? 60_000 : PERIOD_MS);
  const {time_ms: times, leased_bytes: leased} = check(historyOf(run, 1, 0));
  assert.ok(times.length <= 450);
  const gap = times.findIndex((time) => time > before);
  assert.deepEqual([times[gap], leased[gap]], [after - 1, null]);
  const old = leased.slice(gap + 1, gap + 41);
  assert.ok(old.every((bytes) => bytes !== null));
}

// The bounds hold for two hundred sessions, for thousands, and for sessions that come and go.
{
  for (let i = 0; i < 2000; ++i) look(sessions(200));
  assert.ok(remembered() <= MOST, `${remembered()} samples`);
  assert.ok(historyOf(run, 200, 0).time_ms.length >= 200);
  for (let i = 0; i < 300; ++i) look(sessions(1500));
  assert.ok(remembered() <= 1.1 * MOST, `${remembered()} samples`);
  for (let i = 0; i < 1000; ++i) look(sessions(100, undefined, 10_000 + 100 * i));
  assert.ok(remembered() <= MOST / 10, `${remembered()} samples`);
  assert.equal(historyOf(run, 10_000, 0).time_ms.length, 0);
  assert.ok(historyOf(run, 10_000 + 100 * 999, 0).time_ms.length > 0);
  // The history of an ended session stays for a while.
  const ended = 10_000 + 100 * 999;
  for (let i = 0; i < 5 * 60 * 1000 / PERIOD_MS; ++i) look(sessions(1));
  assert.ok(historyOf(run, ended, 0).time_ms.length > 0);
  for (let i = 0; i < 15 * 60 * 1000 / PERIOD_MS; ++i) look(sessions(1));
  assert.equal(historyOf(run, ended, 0).time_ms.length, 0);
}

// A clock that is set back empties the history.
{
  look(sessions(1), -3_600_000);
  assert.deepEqual(historyOf(run, 1, 0).time_ms, [now]);
}

// Ids begin anew with each run of the daemon. A new run's session shares no history with the earlier session of its id.
{
  look(sessions(1, () => held(7 * MIB, 5)));
  run = 'b';
  assert.deepEqual(historyOf(run, 1, 0).time_ms, []);
  look(sessions(1, () => held(3 * MIB)));
  assert.deepEqual([historyOf('b', 1, 0).leased_bytes, historyOf('b', 1, 0).refusals], [[3 * MIB], [0]]);
  assert.equal(historyOf('a', 1, 0).leased_bytes.at(-1), 7 * MIB);
}
// The page writes 00:05 after midnight, not 24:05, and adds the day to times of other days.
{
  const midnight = new Date(2030, 0, 1, 0, 5, 7);
  assert.equal(clock(midnight), '00:05:07');
  assert.equal(moment(midnight), `${day(midnight)} 00:05`);
  const today = new Date();
  assert.equal(moment(today), clock(today));
}
// A large segment among 60 sessions takes few lines, groups follow the given order, and no groups overlap.
{
  const ids = Array.from({length: 60}, (_, i) => i + 1);
  const map = {
    sessions: ids.map((id) => ({id, name: `job-${id}`, answer: 'blocks'})),
    segments: ids.map((id) => ({id, session_id: id, bytes: (id === 7 ? 1024 : 20) * MIB, state: 'leased'})),
  };
  const order = [...ids].reverse();
  const {groups, slices, height} = layOut(groupsOf(map, null, order), 1230);
  assert.deepEqual(groups.map(({key}) => key), order);
  assert.ok(slices.filter(({group}) => group.key === 7).length <= 4);
  groups.slice(1).forEach((group, i) => {
    const before = groups[i];
    assert.ok(group.y > before.y || (group.y === before.y && group.x > before.x), `${group.label} is before ${before.label}`);
    assert.ok(group.y === before.y || group.y >= Math.max(...groups.filter(({y}) => y === before.y).map(({end}) => end)));
  });
  assert.equal(height, Math.max(...groups.map(({end}) => end)));
}
console.log('history: ok');
