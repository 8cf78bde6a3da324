// SPDX-License-Identifier: Apache-2.0
// What memory was used for over time: a device's in the last 15 minutes, or a session's since the page was opened.
import {Chart} from './chart.js';
import {el, setText} from './dom.js';
import {moment, percent} from './format.js';
import {historyOf} from './history.js';
import {onThemeChange} from './palette.js';

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

const refusedIn = (refusals) => {
  const known = refusals.filter((count) => count !== null);
  return known.length === 0 ? 0 : known.at(-1) - known[0];
};
const refusedText = (count) => (count === 0 ? 'no refusal' : `${count} refused`);

// Of a device: an answer of /api/v1/timeline.
export function showTimeline(title, note, answer) {
  const end = answer.time_ms.length - 1;
  setText(title, 'Last 15 minutes');
  if (end < 0) return;
  const leased = answer.leased_bytes[end];
  const fragmented = percent(answer.inactive_split_bytes[end] / leased);
  const reclaimable = percent(answer.reclaimable_bytes[end] / leased);
  setText(note, (leased === 0 ? 'sessions hold nothing; ' :
    `of what sessions hold ${fragmented} is fragmented, ${reclaimable} reclaimable; `) +
    refusedText(refusedIn(answer.refusals)));
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

// Of a session, which the daemon keeps no history of.
export function showHistory(title, note, id, device, limit) {
  const history = historyOf(id, device);
  setText(title, 'History');
  setText(note, `seen by this page since ${moment(new Date(history.since))}; ${refusedText(refusedIn(history.refusals))}`);
  const most = Math.max(2 ** 20, ...history.leased_bytes);
  draw(`session ${id} ${device}`, {
    ...history,
    areas: parts(history),
    line: {label: 'limit', value: limit},
    top: 2 ** Math.ceil(Math.log2(most)),
  });
}
