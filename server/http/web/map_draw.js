// SPDX-License-Identifier: Apache-2.0
// Draws the memory map. Blocks thinner than a few pixels are drawn together: 10,000 blocks take less than a frame.
import {el} from './dom.js';
import {bytes} from './format.js';
import {FREE, LABEL, LINE, PENDING, SLIM, blockAt, isReclaimable} from './map_layout.js';
import {color, sessionColorName} from './palette.js';

const THIN = 3;  // blocks below this width are drawn together

const patterns = new Map();
// Stripes that run 'up', 'down' or 'upright', as in bars.
function hatch(context, name, run) {
  const key = `${name} ${run}`;
  if (patterns.has(key)) return patterns.get(key);
  const size = 6;
  const tile = el('canvas', {width: size, height: size});
  const draw = tile.getContext('2d');
  draw.fillStyle = color('--hole');
  draw.fillRect(0, 0, size, size);
  draw.strokeStyle = color(name);
  draw.lineWidth = run === 'upright' ? 3 : 2;
  const [from, to] = {up: [size, 0], down: [0, size], upright: [0, size]}[run];
  for (const shift of [-size, 0, size]) {
    draw.beginPath();
    draw.moveTo(run === 'upright' ? 1.5 : shift, from);
    draw.lineTo(run === 'upright' ? 1.5 : shift + size, to);
    draw.stroke();
  }
  const pattern = context.createPattern(tile, 'repeat');
  patterns.set(key, pattern);
  return pattern;
}

export const forgetPatterns = () => patterns.clear();

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
      context.fillStyle = hatch(context, name, 'up');
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

export function drawSlice(context, slice, y) {
  const {group, segment, x, w} = slice;
  const name = sessionColorName(group.key);
  const known = segment.starts !== undefined;
  context.fillStyle = known ? color(isReclaimable(segment) ? '--reclaimable' : '--fragmented') :
    hatch(context, '--allocated', 'upright');
  context.fillRect(x, y, w, LINE);
  let edge = '--hole-edge';
  if (segment.state === 'idle') {
    context.fillStyle = hatch(context, '--cached', 'up');
    context.fillRect(x, y, w, LINE);
  } else if (segment.state === 'quarantined') {
    context.fillStyle = hatch(context, '--quarantined', 'down');
    context.fillRect(x, y, w, LINE);
    edge = '--quarantined';
  } else if (known) {
    drawBlocks(context, slice, y, name);
  } else {
    edge = name;
    context.setLineDash([4, 3]);
    if (w > 96) {
      context.fillStyle = color('--hole');
      context.fillRect(x + 5, y + 2, 88, LINE - 4);
      context.fillStyle = color('--text');
      context.font = '11px system-ui, sans-serif';
      context.fillText(group.answer === 'too_many_blocks' ? 'too many blocks' : 'no answer', x + 9, y + 13);
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

export function drawLabel(context, group, y) {
  const isSession = typeof group.key === 'number';
  const top = y + (group.narrow ? 10 : 13);
  const left = group.x + (isSession ? 14 : 0);
  if (isSession) {
    context.fillStyle = color(sessionColorName(group.key));
    context.fillRect(group.x, top - 9, 9, 9);
  }
  context.fillStyle = color(isSession ? '--text' : '--muted');
  context.font = '600 12px system-ui, sans-serif';
  context.fillText(fitText(context, group.label, group.narrow ? group.width - 114 : LABEL - 24), left, top);
  if (!group.narrow && group.end - group.y < LINE + 12) return;
  context.font = '11px system-ui, sans-serif';
  context.fillStyle = color('--muted');
  if (group.narrow) {
    context.textAlign = 'right';
    context.fillText(bytes(group.bytes), group.x + group.width, top);
    context.textAlign = 'left';
  } else {
    context.fillText(bytes(group.bytes), left, top + 15);
  }
}
