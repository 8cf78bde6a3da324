// SPDX-License-Identifier: Apache-2.0
// The memory map: each segment a bar, to scale, with its blocks. Only the lines in view are drawn.
import {byId, el, setText} from './dom.js';
import {bytes, plural, shortBytes} from './format.js';
import {drawLabel, drawSlice, forgetPatterns} from './map_draw.js';
import {FREE, LINE, blockAt, groupsOf, isReclaimable, layOut, lineBytesOf, prepare} from './map_layout.js';
import {showMore} from './more.js';
import {onThemeChange} from './palette.js';
import {scopeOf} from './scopes.js';

const FRAME_PADDING = 10;  // as in style.css
const STATES = ['fragmented', 'allocated', 'freed, still in use by a stream'];

let canvas, frame, sizer, tip, mark;
let onChoose = () => {};
let answer = null;   // of /api/v1/map, with what prepare() adds
let wanted = null;   // ids of the sessions that are shown alone
let order = [];      // ids of sessions, as in the table
let layout = {groups: [], slices: [], height: 0};
let cursor = null;   // {segment, block}: what the keyboard is on
let frameAsked = false;

function draw() {
  frameAsked = false;
  if (answer === null) return;
  const started = performance.now();
  const width = sizer.clientWidth;
  if (width <= 0) return;
  layout = layOut(groupsOf(answer, wanted, order), width);
  const whole = Math.max(LINE, layout.height) + 2;
  sizer.style.height = `${whole}px`;
  // The window's height bounds the frame's.
  const height = Math.min(whole, frame.clientHeight);
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const top = scrolled();
  const inView = (from, to) => to >= top && from <= top + height;
  for (const group of layout.groups) if (inView(group.y, group.end)) drawLabel(context, group, group.y - top);
  for (const slice of layout.slices) if (inView(slice.y, slice.y + LINE)) drawSlice(context, slice, slice.y - top);
  canvas.dataset.drawMs = (performance.now() - started).toFixed(2);
  canvas.dataset.groups = String(layout.groups.length);
  showMore(frame, byId('map-more'), 'Rows', [...new Set(layout.groups.map(({end}) => end + FRAME_PADDING))]);
}

// How much of the map is above the canvas, which stays in view.
function scrolled() {
  return canvas.getBoundingClientRect().top - sizer.getBoundingClientRect().top;
}

function askForFrame() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(draw);
}

// ---- What is under the pointer ----

function sliceAt(x, y) {
  const at = y + scrolled();
  return layout.slices.find((s) => at >= s.y && at <= s.y + LINE && x >= s.x && x <= s.x + s.w);
}

function describe(slice, block) {
  const {group, segment} = slice;
  const lines = [];
  if (segment.starts !== undefined) {
    const [size, requested, state] = segment.blocks.slice(3 * block, 3 * block + 3);
    const asked = state === FREE ? '' : `, ${bytes(requested)} asked for`;
    const what = isReclaimable(segment) ? 'reclaimable' : STATES[state];
    lines.push(`${bytes(size)} ${what}${asked}`, `at ${bytes(segment.starts[block])} of the segment`);
    const scope = scopeOf(answer, segment, block);
    if (scope !== undefined) lines.push(`scope ${scope}`);
  } else if (segment.state === 'idle') {
    lines.push('cached by the daemon: ready for its last tenant, or given back to the driver in a while');
  } else if (segment.state === 'quarantined') {
    lines.push(`of ${segment.client}, which is gone; kept until nobody can touch it`);
  } else if (group.answer === 'too_many_blocks') {
    lines.push('too many blocks to draw; /snapshot.json has them');
  } else {
    lines.push('its session does not answer: blocks not known');
  }
  const returning = segment.state === 'returning' ? ', asked back' : '';
  const pool = segment.pool === undefined ? '' : `, ${segment.pool} pool, stream ${segment.stream}`;
  lines.push(`segment ${segment.id} of ${bytes(segment.bytes)}${pool}${returning}`);
  if (segment.free > 0) {
    lines.push(isReclaimable(segment) ? 'no block in use: all of it can be given back' :
      `${bytes(segment.free)} of it fragmented, the largest piece ${bytes(segment.largest)}`);
  }
  return {title: group.label, lines};
}

function showTip(slice, block) {
  const {title, lines} = describe(slice, block);
  tip.replaceChildren(el('b', {}, title), ...lines.map((line) => el('span', {}, line)));
  tip.hidden = mark.hidden = false;
  let {x, w} = slice;
  if (slice.segment.starts !== undefined) {
    const from = Math.max(slice.from, slice.segment.starts[block]);
    const to = Math.min(slice.to, slice.segment.starts[block] + slice.segment.blocks[3 * block]);
    x += (from - slice.from) * slice.scale;
    w = (to - from) * slice.scale;
  }
  // By the box that the tip is placed in.
  const ground = tip.offsetParent.getBoundingClientRect();
  const box = canvas.getBoundingClientRect();
  const left = box.left - ground.left + x;
  const top = box.top - ground.top + slice.y - scrolled();
  Object.assign(mark.style, {left: `${left - 1}px`, top: `${top - 1}px`, width: `${Math.max(w, 2) + 2}px`,
    height: `${LINE + 2}px`});
  const room = frame.clientWidth - tip.offsetWidth - 6;
  const below = top + LINE + 6;
  const fits = ground.top + below + tip.offsetHeight <= innerHeight;
  tip.style.left = `${Math.max(6, Math.min(left, room))}px`;
  tip.style.top = `${fits ? below : top - tip.offsetHeight - 6}px`;
}

function hideTip() {
  tip.hidden = mark.hidden = true;
}

function pointAt(event) {
  const box = canvas.getBoundingClientRect();
  const slice = sliceAt(event.clientX - box.left, event.clientY - box.top);
  if (slice === undefined) {
    hideTip();
    return null;
  }
  const offset = slice.from + (event.clientX - box.left - slice.x) / slice.scale;
  const block = slice.segment.starts === undefined ? 0 : blockAt(slice.segment, offset);
  showTip(slice, block);
  return slice;
}

function choose(slice) {
  if (slice === null || typeof slice.group.key !== 'number') return;
  hideTip();
  onChoose(slice.group.key);
}

// Left and right: blocks; up and down: segments.
function onKey(event) {
  const segments = layout.groups.flatMap((group) => group.segments);
  if (event.key === 'Escape') hideTip();
  if (!['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown', 'Enter'].includes(event.key) || segments.length === 0) return;
  event.preventDefault();
  let at = cursor === null ? -1 : segments.findIndex((segment) => segment.id === cursor.segment.id &&
    segment.state === cursor.segment.state);
  let block = cursor === null || at < 0 ? 0 : cursor.block;
  const blocksOf = (i) => segments[i].starts?.length ?? 1;
  if (at < 0) {
    at = 0;
  } else if (event.key === 'ArrowRight') {
    if (++block >= blocksOf(at)) [at, block] = [Math.min(at + 1, segments.length - 1), 0];
  } else if (event.key === 'ArrowLeft') {
    if (--block < 0) {
      at = Math.max(at - 1, 0);
      block = blocksOf(at) - 1;
    }
  } else if (event.key === 'ArrowDown') {
    [at, block] = [Math.min(at + 1, segments.length - 1), 0];
  } else if (event.key === 'ArrowUp') {
    [at, block] = [Math.max(at - 1, 0), 0];
  }
  const segment = segments[at];
  block = Math.min(block, blocksOf(at) - 1);
  cursor = {segment, block};
  const start = segment.starts?.[block] ?? 0;
  const slice = layout.slices.find((s) => s.segment === segment && start >= s.from && start < s.to);
  if (slice === undefined) return;
  if (event.key === 'Enter') {
    choose(slice);
    return;
  }
  const end = slice.y + LINE + 16;  // with the frame's padding
  if (slice.y < frame.scrollTop) frame.scrollTop = slice.y;
  if (end > frame.scrollTop + frame.clientHeight) frame.scrollTop = end - frame.clientHeight;
  showTip(slice, block);
  const {title, lines} = describe(slice, block);
  setText(byId('map-spoken'), [title, ...lines].join('; '));
}

// ---- For app.js ----

export function startMap(onSession) {
  canvas = byId('map');
  sizer = canvas.parentElement;
  frame = sizer.parentElement;
  tip = byId('map-tip');
  mark = byId('map-mark');
  onChoose = onSession;
  canvas.addEventListener('pointermove', pointAt);
  canvas.addEventListener('pointerleave', hideTip);
  canvas.addEventListener('blur', hideTip);
  canvas.addEventListener('click', (event) => choose(pointAt(event)));
  canvas.addEventListener('keydown', onKey);
  frame.addEventListener('scroll', () => {
    hideTip();
    askForFrame();
  });
  new ResizeObserver(askForFrame).observe(frame);
  onThemeChange(() => {
    forgetPatterns();
    askForFrame();
  });
}

// Of the sessions with these ids, in this order, and of them alone where `alone` says so. `empty`: what to say when there
// is nothing.
export function showInMap(ids, alone, empty) {
  const same = (wanted !== null) === alone && order.join() === ids.join();
  wanted = alone ? new Set(ids) : null;
  order = ids;
  setText(byId('map-empty'), empty);
  if (!same && answer !== null) describeAll();
}

export function showMap(map) {
  if (map.run_id !== answer?.run_id) cursor = null;
  map.segments.forEach(prepare);
  answer = map;
  describeAll();
}

function describeAll() {
  askForFrame();
  const groups = groupsOf(answer, wanted, order);
  const segments = groups.flatMap((group) => group.segments);
  const sum = (of) => segments.reduce((total, segment) => total + of(segment), 0);
  const blocks = sum((segment) => segment.starts?.length ?? 0);
  const silent = groups.filter((group) => (group.answer ?? 'blocks') !== 'blocks').map((group) => group.label);
  const parts = [plural(segments.length, 'segment'), plural(blocks, 'block')];
  if (segments.length > 0) parts.push(`a full line is ${shortBytes(lineBytesOf(groups))}`);
  if (silent.length > 0) {
    const more = silent.length > 5 ? ` and ${silent.length - 5} more` : '';
    parts.push(`no answer from ${silent.slice(0, 5).join(', ')}${more}`);
  }
  // What sessions that are not shown have is reserved, too.
  const nothing = wanted === null ? 'nothing is reserved' : '';
  setText(byId('map-note'), segments.length === 0 ? nothing : parts.join(' · '));
  const perGroup = groups.map((group) => `${group.label}: ${plural(group.segments.length, 'segment')}, ` +
    `${bytes(group.bytes)}`);
  const total = sum((segment) => segment.bytes);
  const reclaimable = sum((segment) => (isReclaimable(segment) ? segment.bytes : 0));
  const fragmented = sum((segment) => segment.free ?? 0) - reclaimable;
  const shares = total === 0 ? '' : `, ${bytes(fragmented)} of it fragmented, ${bytes(reclaimable)} reclaimable`;
  setText(byId('map-summary'), `${bytes(total)} in ${parts.join(', ')}${shares}. ${perGroup.join('; ')}.`);
  byId('map-empty').hidden = segments.length > 0;
  frame.hidden = segments.length === 0;
  canvas.dataset.blocks = String(blocks);
  canvas.dataset.segments = String(segments.length);
  canvas.dataset.order = groups.map(({label}) => label).join('\n');
}
