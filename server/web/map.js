// SPDX-License-Identifier: Apache-2.0
// The memory map: each segment a bar, to scale, with its blocks; grouped by session, then what the daemon holds.
// Segments flow like words in lines; one that is longer than a line goes on in the next.
//
// Only the lines in view are drawn, and blocks thinner than a few pixels are drawn together: a map of 10,000 blocks is
// drawn within one frame.
import {byId, el, setText} from './dom.js';
import {bytes, percent, plural, shortBytes} from './format.js';
import {color, onThemeChange, sessionColorName} from './palette.js';

const LINE = 18;  // height of a bar; all in CSS pixels
const LINE_GAP = 4;
const GROUP_GAP = 8;
const BAR_GAP = 2;      // between segments; less between those that are hardly wider
const SLIM = 8;         // segments below this width have no edge
const LEAST_WIDTH = 3;  // of a segment
const THIN = 3;         // blocks below this width are drawn together
const LABEL = 138;      // width of the labels; none on narrow pages, where they have a line of their own
const NARROW = 560;
const MOST_HEIGHT = 520;
const LINES_WANTED = 9;

const FREE = 0;
const PENDING = 2;
const STATES = ['free', 'allocated', 'freed, still in use by a stream'];

let canvas, frame, spacer, tip, mark;
let onChoose = () => {};
let answer = null;   // of /api/v1/map, with what prepare() adds
let chosen = null;   // a session's id
let layout = {groups: [], slices: [], height: 0, lineBytes: 1};
let cursor = null;   // {slice, block}: what the keyboard is on
let frameAsked = false;

// ---- Layout ----

// Offsets of blocks, and what is asked for often.
function prepare(segment) {
  const blocks = segment.blocks;
  if (blocks === undefined) return;
  const starts = new Float64Array(blocks.length / 3);
  let at = 0;
  let free = 0;
  let largest = 0;
  for (let i = 0; i < starts.length; ++i) {
    starts[i] = at;
    at += blocks[3 * i];
    if (blocks[3 * i + 2] !== FREE) continue;
    free += blocks[3 * i];
    largest = Math.max(largest, blocks[3 * i]);
  }
  Object.assign(segment, {starts, free, largest});
}

function groupsOf(map) {
  const sessions = new Map(map.sessions.map((session) => [session.id,
    {key: session.id, label: session.name, answer: session.answer, segments: []}]));
  const quarantined = {key: 'quarantined', label: 'left behind', segments: []};
  const idle = {key: 'idle', label: 'idle (daemon)', segments: []};
  for (const segment of map.segments) {
    if (segment.state === 'idle') {
      idle.segments.push(segment);
    } else if (segment.state === 'quarantined') {
      quarantined.segments.push(segment);
    } else {
      // A session that came after the list was made.
      if (!sessions.has(segment.session_id)) {
        sessions.set(segment.session_id,
          {key: segment.session_id, label: `session ${segment.session_id}`, answer: 'none', segments: []});
      }
      sessions.get(segment.session_id).segments.push(segment);
    }
  }
  const groups = [...sessions.values(), quarantined, idle].filter((group) => group.segments.length > 0);
  for (const group of groups) group.bytes = group.segments.reduce((sum, segment) => sum + segment.bytes, 0);
  return groups;
}

// Slices: pieces of segments that lie in one line.
function layOut(map, width) {
  const groups = groupsOf(map);
  const narrow = width < NARROW;
  const left = narrow ? 0 : LABEL;
  const lineWidth = width - left;
  const total = groups.reduce((sum, group) => sum + group.bytes, 0);
  const lineBytes = 2 ** Math.ceil(Math.log2(Math.max(total / LINES_WANTED, 2 ** 21)));
  const scale = lineWidth / lineBytes;
  const slices = [];
  let y = 0;
  for (const group of groups) {
    group.y = y;
    if (narrow) y += 16;
    let x = 0;
    const nextLine = () => {
      x = 0;
      y += LINE + LINE_GAP;
    };
    for (const segment of group.segments) {
      let from = 0;
      while (from < segment.bytes) {
        const rest = Math.max(LEAST_WIDTH, (segment.bytes - from) * scale);
        const room = lineWidth - x;
        if (rest > room + 0.5 && x > 0 && (rest <= lineWidth || room < 48)) {
          nextLine();
          continue;
        }
        const w = Math.min(rest, room);
        const to = w >= rest - 0.5 ? segment.bytes : from + w / scale;
        slices.push({group, segment, x: left + x, y, w, from, to, scale: w / (to - from)});
        x += w + (w < SLIM ? 0.75 : BAR_GAP);
        from = to;
        if (from < segment.bytes) nextLine();
      }
    }
    y += LINE + GROUP_GAP;
    group.end = y - GROUP_GAP;
  }
  return {groups, slices, height: Math.max(0, y - GROUP_GAP), lineBytes, left};
}

// ---- Drawing ----

const patterns = new Map();
function hatch(context, name, falling) {
  const key = `${name} ${falling}`;
  if (patterns.has(key)) return patterns.get(key);
  const size = 6;
  const tile = el('canvas', {width: size, height: size});
  const draw = tile.getContext('2d');
  draw.strokeStyle = color(name);
  draw.lineWidth = 2;
  for (const shift of [-size, 0, size]) {
    draw.beginPath();
    draw.moveTo(shift, falling ? 0 : size);
    draw.lineTo(shift + size, falling ? size : 0);
    draw.stroke();
  }
  const pattern = context.createPattern(tile, 'repeat');
  patterns.set(key, pattern);
  return pattern;
}

const isChosen = (group) => chosen === null || group.key === chosen;

// The block at `offset`.
function blockAt(segment, offset) {
  let low = 0;
  let high = segment.starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (segment.starts[middle] <= offset) low = middle; else high = middle - 1;
  }
  return low;
}

function drawBlocks(context, slice, y, name) {
  const {segment} = slice;
  const {blocks, starts} = segment;
  const fill = color(name);
  let runStart = -1;
  let runEnd = 0;
  const flush = () => {
    if (runStart >= 0) context.fillRect(runStart, y, Math.max(runEnd - runStart, 0.5), LINE);
    runStart = -1;
  };
  context.fillStyle = fill;
  for (let i = blockAt(segment, slice.from); i < starts.length && starts[i] < slice.to; ++i) {
    const state = blocks[3 * i + 2];
    if (state === FREE) {
      flush();
      continue;
    }
    const begin = slice.x + (Math.max(starts[i], slice.from) - slice.from) * slice.scale;
    const end = slice.x + (Math.min(starts[i] + blocks[3 * i], slice.to) - slice.from) * slice.scale;
    if (state === PENDING) {
      flush();
      context.fillStyle = hatch(context, name, false);
      context.fillRect(begin, y, end - begin, LINE);
      context.fillStyle = fill;
    } else if (end - begin >= THIN) {
      flush();
      context.fillRect(begin, y, end - begin - 0.75, LINE);
    } else {
      if (runStart < 0) runStart = begin;
      runEnd = end;
    }
  }
  flush();
}

function drawSlice(context, slice, y) {
  const {group, segment, x, w} = slice;
  const name = sessionColorName(group.key);
  context.globalAlpha = isChosen(group) ? 1 : 0.16;
  context.fillStyle = color('--hole');
  context.fillRect(x, y, w, LINE);
  let edge = '--hole-edge';
  if (segment.state === 'idle') {
    context.fillStyle = hatch(context, '--idle', false);
    context.fillRect(x, y, w, LINE);
  } else if (segment.state === 'quarantined') {
    context.fillStyle = hatch(context, '--quarantined', true);
    context.fillRect(x, y, w, LINE);
    edge = '--quarantined';
  } else if (segment.starts !== undefined) {
    drawBlocks(context, slice, y, name);
  } else {
    edge = name;
    context.setLineDash([4, 3]);
    if (w > 76) {
      context.fillStyle = color('--muted');
      context.font = '11px system-ui, sans-serif';
      context.fillText(group.answer === 'too_many_blocks' ? 'too many blocks' : 'no answer', x + 7, y + 13);
    }
  }
  context.strokeStyle = color(edge);
  context.lineWidth = 1;
  if (w >= SLIM) context.strokeRect(x + 0.5, y + 0.5, Math.max(w - 1, 1), LINE - 1);
  context.setLineDash([]);
}

function fitText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) --end;
  return `${text.slice(0, end)}…`;
}

function drawLabel(context, group, y, width) {
  context.globalAlpha = isChosen(group) ? 1 : 0.45;
  const isSession = typeof group.key === 'number';
  const top = y + (layout.left === 0 ? 10 : 13);
  if (isSession) {
    context.fillStyle = color(sessionColorName(group.key));
    context.fillRect(0, top - 9, 9, 9);
  }
  const text = (layout.left === 0 ? width : LABEL) - 24;
  context.fillStyle = color(isSession ? '--text' : '--muted');
  context.font = '600 12px system-ui, sans-serif';
  if (layout.left === 0) {
    const size = bytes(group.bytes);
    context.fillText(fitText(context, group.label, text - 90), isSession ? 14 : 0, top);
    context.font = '11px system-ui, sans-serif';
    context.fillStyle = color('--muted');
    context.textAlign = 'right';
    context.fillText(size, width, top);
    context.textAlign = 'left';
    return;
  }
  context.fillText(fitText(context, group.label, text), isSession ? 14 : 0, top);
  if (group.end - group.y < LINE + 12) return;
  context.font = '11px system-ui, sans-serif';
  context.fillStyle = color('--muted');
  context.fillText(bytes(group.bytes), isSession ? 14 : 0, top + 15);
}

function draw() {
  frameAsked = false;
  if (answer === null) return;
  const started = performance.now();
  const width = frame.clientWidth - 24;
  if (width <= 0) return;
  layout = layOut(answer, width);
  const height = Math.max(LINE, Math.min(layout.height, MOST_HEIGHT)) + 2;
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  spacer.style.height = `${Math.max(0, layout.height + 2 - height)}px`;
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const top = frame.scrollTop;
  const inView = (from, to) => to >= top && from <= top + height;
  for (const group of layout.groups) if (inView(group.y, group.end)) drawLabel(context, group, group.y - top, width);
  for (const slice of layout.slices) if (inView(slice.y, slice.y + LINE)) drawSlice(context, slice, slice.y - top);
  context.globalAlpha = 1;
  canvas.dataset.drawMs = (performance.now() - started).toFixed(2);
}

function askForFrame() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(draw);
}

// ---- What is under the pointer ----

function sliceAt(x, y) {
  const at = y + frame.scrollTop;
  return layout.slices.find((s) => at >= s.y && at <= s.y + LINE && x >= s.x && x <= s.x + s.w);
}

function describe(slice, block) {
  const {group, segment} = slice;
  const lines = [];
  if (segment.starts !== undefined) {
    const [size, requested, state] = segment.blocks.slice(3 * block, 3 * block + 3);
    const asked = state === FREE ? '' : `, ${bytes(requested)} asked for`;
    lines.push(`${bytes(size)} ${STATES[state]}${asked}`, `at ${bytes(segment.starts[block])} of the segment`);
  } else if (segment.state === 'idle') {
    lines.push('idle: ready for its last tenant, or given back to the driver in a while');
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
  if (segment.free > 0) lines.push(`${bytes(segment.free)} of it free, the largest piece ${bytes(segment.largest)}`);
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
  const y = slice.y - frame.scrollTop;
  const left = canvas.offsetLeft;
  const top = canvas.offsetTop - frame.scrollTop;
  Object.assign(mark.style, {left: `${left + x - 1}px`, top: `${top + frame.scrollTop + y - 1}px`,
    width: `${Math.max(w, 2) + 2}px`, height: `${LINE + 2}px`});
  const room = frame.clientWidth - tip.offsetWidth - 6;
  tip.style.left = `${Math.max(6, Math.min(left + x, room))}px`;
  tip.style.top = `${top + frame.scrollTop + y + LINE + 6}px`;
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

function sessionOf(slice) {
  return typeof slice.group.key === 'number' ? slice.group.key : null;
}

// Left and right: blocks; up and down: segments.
function onKey(event) {
  const segments = layout.groups.flatMap((group) => group.segments);
  if (event.key === 'Escape') {
    hideTip();
    onChoose(null);
    return;
  }
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
  if (event.key === 'Enter') onChoose(sessionOf(slice) === chosen ? null : sessionOf(slice));
  if (slice.y < frame.scrollTop) frame.scrollTop = slice.y;
  if (slice.y + LINE > frame.scrollTop + MOST_HEIGHT) frame.scrollTop = slice.y + LINE - MOST_HEIGHT;
  showTip(slice, block);
  const {title, lines} = describe(slice, block);
  setText(byId('map-spoken'), [title, ...lines].join('; '));
}

// ---- For app.js ----

export function startMap(choose) {
  canvas = byId('map');
  frame = canvas.parentElement;
  spacer = byId('map-spacer');
  tip = byId('map-tip');
  mark = byId('map-mark');
  onChoose = choose;
  canvas.addEventListener('pointermove', pointAt);
  canvas.addEventListener('pointerleave', hideTip);
  canvas.addEventListener('blur', hideTip);
  canvas.addEventListener('click', (event) => {
    const slice = pointAt(event);
    const session = slice === null ? null : sessionOf(slice);
    onChoose(session === chosen ? null : session);
  });
  canvas.addEventListener('keydown', onKey);
  frame.addEventListener('scroll', () => {
    hideTip();
    askForFrame();
  });
  new ResizeObserver(askForFrame).observe(frame);
  onThemeChange(() => {
    patterns.clear();
    askForFrame();
  });
}

export function chooseInMap(session) {
  chosen = session;
  askForFrame();
}

export function showMap(map) {
  let blocks = 0;
  let free = 0;
  for (const segment of map.segments) {
    prepare(segment);
    blocks += segment.starts?.length ?? 0;
    free += segment.free ?? 0;
  }
  answer = map;
  askForFrame();
  const lineBytes = layOut(map, 1000).lineBytes;
  const silent = map.sessions.filter((session) => session.answer !== 'blocks');
  const parts = [plural(map.segments.length, 'segment'), plural(blocks, 'block')];
  if (map.segments.length > 0) parts.push(`a full line is ${shortBytes(lineBytes)}`);
  if (silent.length > 0) parts.push(`no answer from ${silent.map((session) => session.name).join(', ')}`);
  setText(byId('map-note'), map.segments.length === 0 ? 'nothing is reserved' : parts.join(' · '));
  const perSession = groupsOf(map).map((group) => `${group.label}: ${plural(group.segments.length, 'segment')}, ` +
    `${bytes(group.bytes)}`);
  const total = map.segments.reduce((sum, segment) => sum + segment.bytes, 0);
  const share = total === 0 ? '' : `, ${percent(free / total)} of it in holes`;
  setText(byId('map-summary'), `${bytes(total)} in ${parts.join(', ')}${share}. ${perSession.join('; ')}.`);
  byId('map-empty').hidden = map.segments.length > 0;
  frame.hidden = map.segments.length === 0;
  canvas.dataset.blocks = String(blocks);
  canvas.dataset.segments = String(map.segments.length);
}
