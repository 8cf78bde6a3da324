// SPDX-License-Identifier: Apache-2.0
// A chart of parts that add up, over time: areas that lie on each other, and a line above which they cannot go.
import uPlot from './charts.js';
import {bytes, clock, day, moment, shortBytes} from './format.js';
import {color} from './palette.js';

const LEAST_SECONDS = 60;  // shown of what has just begun
const HEADROOM = 1.03;     // a line at the end of the scale is whole
const LABEL_ROOM = 30;     // at the right: half of the last label of the time axis
const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
// Seconds between the labels of the time axis. Each step is less than three times the step before, so that a range with
// room for three labels of the smaller step has at least one label of the larger step.
const LABEL_STEPS = [1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE,
  HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 5 * DAY, 10 * DAY];

// Sums from the bottom: the largest is drawn first.
function columns(data) {
  const stacked = data.areas.map(() => []);
  data.time_ms.forEach((_, i) => {
    let sum = 0;
    for (let area = data.areas.length - 1; area >= 0; --area) {
      const value = data.areas[area].values[i];
      sum = value === null ? null : sum + value;
      stacked[area].push(sum);
    }
  });
  const line = data.line.value <= data.top ? data.line.value : null;
  return [data.time_ms.map((ms) => ms / 1000), ...stacked, data.time_ms.map(() => line)];
}

// A line for each time at which a request was refused, and a mark where one waits.
function drawEvents(u, data) {
  const {ctx, bbox} = u;
  const pixel = devicePixelRatio;
  ctx.save();
  data.refusals.forEach((count, i) => {
    const x = u.valToPos(data.time_ms[i] / 1000, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    if (i > 0 && data.refusals[i - 1] !== null && count > data.refusals[i - 1]) {
      ctx.strokeStyle = ctx.fillStyle = color('--bad');
      ctx.lineWidth = pixel;
      ctx.setLineDash([3 * pixel, 2 * pixel]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - 4 * pixel, bbox.top);
      ctx.lineTo(x + 4 * pixel, bbox.top);
      ctx.lineTo(x, bbox.top + 6 * pixel);
      ctx.fill();
    }
    if (data.waiting[i] > 0) {
      ctx.fillStyle = color('--warn');
      ctx.fillRect(x - pixel, bbox.top + bbox.height - 4 * pixel, 3 * pixel, 4 * pixel);
    }
  });
  ctx.restore();
}

function timeRange(times) {
  const end = times.at(-1) / 1000;
  return [Math.min(times[0] / 1000, end - LEAST_SECONDS), end];
}

// uPlot places the first label without a look at the end of the scale. Takes out times beyond the end.
function withinScale(u, times) {
  return times.map((s) => (s <= u.scales.x.max ? s : null));
}

// `step`: seconds between labels.
function timeLabel(date, step) {
  if (step < 60) return clock(date);
  return date.getHours() === 0 && date.getMinutes() === 0 ? day(date) : clock(date).slice(0, 5);
}

// The parent's size is the chart's, legend included.
export class Chart {
  // `data`: time_ms, refusals and waiting, by sample; areas, from the top, each {label, color, values}; line,
  // {label, value}; top, the end of the scale. A later show() has the same areas.
  constructor(parent, data) {
    this.parent = parent;
    this.data = data;
    const grid = {stroke: () => color('--line'), width: 1};
    const axis = {
      stroke: () => color('--muted'),
      grid,
      ticks: {show: false},
      font: '11px system-ui, sans-serif',
    };
    const last = () => this.data.time_ms.length - 1;
    this.plot = new uPlot({
      width: parent.clientWidth,
      height: 100,
      padding: [8, LABEL_ROOM, 0, 0],
      cursor: {y: false, points: {show: false}},
      scales: {x: {range: () => timeRange(this.data.time_ms)}, y: {range: () => [0, HEADROOM * this.data.top]}},
      axes: [
        {...axis, size: 30, gap: 9, space: 72, incrs: LABEL_STEPS, filter: withinScale,
          grid: {...grid, filter: withinScale},
          values: (u, times, axisIndex, space, step) =>
            times.map((s) => (s === null ? null : timeLabel(new Date(1000 * s), step)))},
        // Powers of two, so that labels are round in the units of memory.
        {...axis, size: 62, values: (u, values) => values.map(shortBytes),
          splits: () => [0, 0.25, 0.5, 0.75, 1].map((part) => part * this.data.top)},
      ],
      series: [
        {label: 'time', value: (u, s) => (s === null ? 'now' : moment(new Date(1000 * s)))},
        ...data.areas.map(({label, color: name}, area) => ({
          label,
          stroke: () => color(name),
          fill: () => color(name),
          width: 0,
          points: {show: false},
          value: (u, v, series, i) => {
            const value = this.data.areas[area].values[i ?? last()];
            return value === null || value === undefined ? '–' : bytes(value);
          },
        })),
        {label: data.line.label, stroke: () => color('--muted'), width: 1, dash: [4, 4], points: {show: false},
          value: () => bytes(this.data.line.value)},
      ],
      hooks: {draw: [(u) => drawEvents(u, this.data)]},
    }, columns(data), parent);
    this.plot.ctx.canvas.setAttribute('aria-hidden', 'true');  // its figures are in the legend
    // The legend takes its size later, and another line when figures become longer.
    this.legend = this.plot.root.querySelector('.u-legend');
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(parent);
    this.sizes.observe(this.legend);
  }

  show(data) {
    this.data = data;
    this.plot.setData(columns(data));
  }

  fit() {
    const width = this.parent.clientWidth;
    const height = this.parent.clientHeight - this.legend.offsetHeight;
    if (width <= 0 || height <= 0 || (this.plot.width === width && this.plot.height === height)) return;
    this.plot.setSize({width, height});
  }

  redraw() {
    this.plot.redraw();
  }

  remove() {
    this.sizes.disconnect();
    this.plot.destroy();
  }
}
