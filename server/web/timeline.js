// SPDX-License-Identifier: Apache-2.0
// What the device's memory was used for in the last 15 minutes.
import uPlot from './charts.js';
import {el, setText} from './dom.js';
import {bytes, clock, percent, shortBytes} from './format.js';
import {color, onThemeChange} from './palette.js';

// Areas that lie on each other: the largest sum is drawn first.
const AREAS = [
  ['left behind', '--quarantined', 'left_behind_bytes'],
  ['idle', '--idle', 'idle_bytes'],
  ['held free', '--held', null],
  ['allocated', '--allocated', 'allocated_bytes'],
];
const HEIGHT = 232;
const LEAST_SECONDS = 60;  // shown of a daemon that has just been started

let plot = null;
let last = null;

// Sums from the bottom, in the order of AREAS.
function columns(answer) {
  const stacked = AREAS.map(() => []);
  answer.time_ms.forEach((_, i) => {
    const allocated = answer.allocated_bytes[i];
    const leased = Math.max(allocated, answer.leased_bytes[i]);
    const idle = leased + answer.idle_bytes[i];
    [idle + answer.left_behind_bytes[i], idle, leased, allocated].forEach((sum, area) => stacked[area].push(sum));
  });
  return [answer.time_ms.map((ms) => ms / 1000), ...stacked, answer.time_ms.map(() => answer.capacity_bytes)];
}

// Of a part alone, at place i of the data.
function partAt(answer, i, area) {
  if (AREAS[area][2] !== null) return answer[AREAS[area][2]][i];
  return Math.max(0, answer.leased_bytes[i] - answer.allocated_bytes[i]);
}

// A line for each time at which a request was refused, and a mark where one waits.
function drawEvents(u) {
  if (last === null) return;
  const {ctx, bbox} = u;
  ctx.save();
  last.refusals.forEach((count, i) => {
    const x = u.valToPos(last.time_ms[i] / 1000, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    if (i > 0 && count > last.refusals[i - 1]) {
      ctx.strokeStyle = ctx.fillStyle = color('--bad');
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([3 * devicePixelRatio, 2 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - 4 * devicePixelRatio, bbox.top);
      ctx.lineTo(x + 4 * devicePixelRatio, bbox.top);
      ctx.lineTo(x, bbox.top + 6 * devicePixelRatio);
      ctx.fill();
    }
    if (last.waiting[i] > 0) {
      ctx.fillStyle = color('--warn');
      ctx.fillRect(x - devicePixelRatio, bbox.top + bbox.height - 4 * devicePixelRatio, 3 * devicePixelRatio,
        4 * devicePixelRatio);
    }
  });
  ctx.restore();
}

// Of all samples; in seconds.
function timeRange(times) {
  const end = times.at(-1) / 1000;
  return [Math.min(times[0] / 1000, end - LEAST_SECONDS), end];
}

// Its figures are in the legend and in the note.
function create(parent) {
  const axis = {
    stroke: () => color('--muted'),
    grid: {stroke: () => color('--line'), width: 1},
    ticks: {show: false},
    font: '11px system-ui, sans-serif',
  };
  return new uPlot({
    width: parent.clientWidth - 20,
    height: HEIGHT,
    padding: [8, 8, 0, 0],
    cursor: {y: false, points: {show: false}},
    scales: {
      x: {range: () => timeRange(last.time_ms)},
      y: {range: (u, min, max) => [0, Math.max(max, 1)]},
    },
    axes: [
      {...axis, size: 26, space: 72, values: (u, times, axisIndex, space, step) =>
        times.map((s) => clock(new Date(1000 * s)).slice(0, step < 60 ? 8 : 5))},
      // Powers of two, so that labels are round in the units of memory.
      {...axis, size: 62, values: (u, values) => values.map(shortBytes),
        splits: (u, index, min, max) => [0, 0.25, 0.5, 0.75, 1].map((part) => part * max)},
    ],
    series: [
      {label: 'time', value: (u, s) => (s === null ? 'now' : clock(new Date(1000 * s)))},
      ...AREAS.map(([label, name], area) => ({
        label,
        stroke: () => color(name),
        fill: () => color(name),
        width: 0,
        points: {show: false},
        value: (u, v, series, i) => bytes(partAt(last, i ?? last.time_ms.length - 1, area)),
      })),
      {label: 'capacity', stroke: () => color('--muted'), width: 1, dash: [4, 4], points: {show: false},
        value: () => bytes(last.capacity_bytes)},
    ],
    hooks: {draw: [drawEvents]},
  }, columns(last), parent);
}

export function startTimeline(parent) {
  if (uPlot === null) {
    parent.append(el('p', {class: 'absent'},
      'This daemon was built without charts: npm was missing. Build it again with -DVRAMBROKER_WEB_CHARTS=ON; ' +
      'the figures are at ', el('a', {href: '/api/v1/timeline'}, '/api/v1/timeline'), '.'));
    return;
  }
  new ResizeObserver(() => plot?.setSize({width: parent.clientWidth - 20, height: HEIGHT})).observe(parent);
  onThemeChange(() => plot?.redraw());
}

export function showTimeline(parent, note, answer) {
  last = answer;
  const end = answer.time_ms.length - 1;
  if (end < 0) return;
  const refused = answer.refusals[end] - answer.refusals[0];
  const leased = answer.leased_bytes[end];
  const free = Math.max(0, 1 - answer.allocated_bytes[end] / leased);
  setText(note, (leased === 0 ? 'sessions hold nothing; ' : `${percent(free)} of what sessions hold is free; `) +
    (refused === 0 ? 'no refusal' : `${refused} refused`));
  if (uPlot === null) return;
  if (plot === null) {
    plot = create(parent);
    plot.ctx.canvas.setAttribute('aria-hidden', 'true');
  } else {
    plot.setData(columns(answer));
  }
}
