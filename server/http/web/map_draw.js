// SPDX-License-Identifier: Apache-2.0
// Draws the memory map. Blocks thinner than a few pixels are drawn together: 10,000 blocks take less than a frame.
import {el} from './dom.js';
import {bytes} from './format.js';
import {FREE, LABEL, LINE, PENDING, SLIM, blockAt, isReclaimable} from './map_layout.js';
import {color, sessionColorName} from './palette.js';

const THIN = 3;  // blocks below this width are drawn together

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

export function drawSlice(context, slice, y) {
  const {group, segment, x, w} = slice;
  const name = sessionColorName(group.key);
  context.fillStyle = color(isReclaimable(segment) ? '--reclaimable' : '--hole');
  context.fillRect(x, y, w, LINE);
  let edge = '--hole-edge';
  if (segment.state === 'idle') {
    context.fillStyle = hatch(context, '--cached', false);
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
