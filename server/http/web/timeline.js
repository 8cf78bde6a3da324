// SPDX-License-Identifier: Apache-2.0
// What memory was used for over time: in the last 15 minutes by the daemon, or of a session since the page was opened.
import {Chart} from './chart.js';
import {el, setText} from './dom.js';
import {bytes, moment} from './format.js';
import {historyOf} from './history.js';
import {onThemeChange} from './palette.js';

const FAR_LIMIT = 16;  // times what a session held at most: the chart leaves such a limit out

let box;           // of the chart
let chart = null;
let shown = '';    // what the chart is of

// Parts of what sessions hold, from the top.
function parts(answer) {
  return [
    {label: 'reclaimable', color: '--reclaimable', values: answer.reclaimable_bytes},
    {label: 'fragmented', color: '--fragmented', values: answer.inactive_split_bytes},
    {label: 'allocated', color: '--allocated', values: answer.allocated_bytes},
  ];
}

function draw(what, data) {
  if (what !== shown) {
    chart?.remove();
    chart = null;
  }
  shown = what;
  box.dataset.samples = String(data.time_ms.length);
  box.dataset.top = String(data.top);
  if (data.time_ms.length === 0) return;
  if (chart === null) {
    chart = new Chart(box, data);
  } else {
    chart.show(data);
  }
}

export function startTimeline(parent) {
  box = el('div', {class: 'chart'});
  parent.append(box);
  onThemeChange(() => chart?.redraw());
}

function refusedText(refusals) {
  const known = refusals.filter((count) => count !== null);
  const count = known.length === 0 ? 0 : known.at(-1) - known[0];
  return count === 0 ? 'no refusal' : `${count} refused`;
}

// Of a device: an answer of /api/v1/timeline.
export function showTimeline(title, note, answer) {
  const end = answer.time_ms.length - 1;
  setText(title, 'Last 15 minutes');
  if (end < 0) return;
  const now = [[answer.inactive_split_bytes, 'fragmented'], [answer.reclaimable_bytes, 'reclaimable']]
    .map(([values, name]) => `${bytes(values[end])} ${name}`).join(', ');
  setText(note, `now ${answer.leased_bytes[end] === 0 ? 'sessions hold nothing' : now}; ${refusedText(answer.refusals)}`);
  draw(`device ${answer.device}`, {
    ...answer,
    areas: [
      {label: 'left behind', color: '--quarantined', values: answer.left_behind_bytes},
      {label: 'cached', color: '--cached', values: answer.idle_bytes},
      ...parts(answer),
    ],
    line: {label: 'capacity', value: answer.capacity_bytes},
    top: Math.max(answer.capacity_bytes, 1),
  });
}

// Parts of what a session held; a daemon may keep no more than what was reserved and allocated.
function partsOfSession(history) {
  if (history.inactive_split_bytes && history.reclaimable_bytes) return parts(history);
  return [
    {label: 'unused', color: '--hole-edge', values: history.leased_bytes.map((held, i) =>
      (held === null ? null : Math.max(0, held - history.allocated_bytes[i])))},
    {label: 'allocated', color: '--allocated', values: history.allocated_bytes},
  ];
}

// Draws the session of that run of the daemon. `kept`: what the daemon answers of it, with a sample or more; null: what this
// page has seen is shown.
export function showHistory(title, note, {run, session}, device, limit, kept) {
  const own = historyOf(run, session, device);
  const history = kept === null ? own :
    {refusals: [], waiting: [], ...kept, leased_bytes: kept.leased_bytes ?? kept.reserved_bytes};
  setText(title, 'History');
  const most = Math.max(2 ** 20, ...history.leased_bytes);
  const top = limit <= FAR_LIMIT * most ? Math.max(most, limit) : most;
  const since = kept === null ? `seen by this page since ${moment(new Date(own.since))}` :
    `since ${moment(new Date(kept.time_ms[0]))}`;
  setText(note, [since, ...(history.refusals.length > 0 ? [refusedText(history.refusals)] : []),
    ...(limit > top ? [`the limit, ${bytes(limit)}, is far above`] : [])].join('; '));
  draw(`session ${run} ${session} ${device} ${kept === null}`, {
    ...history,
    areas: partsOfSession(history),
    line: {label: 'limit', value: limit},
    top: 2 ** Math.ceil(Math.log2(top)),
  });
}
