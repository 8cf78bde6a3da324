// SPDX-License-Identifier: Apache-2.0
// Where the memory map has what. Segments flow like words in lines; one that is longer than a line goes on in the next.
// They are grouped by session, then what the daemon holds. Many groups are set in rows of several, in reading order.

export const LINE = 18;  // height of a bar; all in CSS pixels
export const LABEL = 138;  // width of the labels; none on narrow pages, where they have a line of their own
const LINE_GAP = 4;
const GROUP_GAP = 8;
const LABEL_LINE = 16;  // height, on narrow pages
const BAR_GAP = 2;      // between segments; less between those that are hardly wider
export const SLIM = 8;  // segments below this width have no edge
const LEAST_WIDTH = 3;  // of a segment
const NARROW = 560;
const LINES_WANTED = 9;
const MOST_LINES = 4;   // of a group among many
const FEW = 8;  // groups that have one column
const COLUMN = 520;
const COLUMN_GAP = 28;
const SQUEEZE = 6;  // rather than a sliver in the next line

export const FREE = 0;
export const PENDING = 2;

// Wholly free segments can be given back; a free block in another one is fragmented.
export const isReclaimable = (segment) => segment.free === segment.bytes;

// Adds the offsets of a segment's blocks, and what is asked for often.
export function prepare(segment) {
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

// The block at `offset`.
export function blockAt(segment, offset) {
  let low = 0;
  let high = segment.starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (segment.starts[middle] <= offset) low = middle; else high = middle - 1;
  }
  return low;
}

// `wanted`: ids of the sessions that are shown alone; null: all, and what belongs to none. `order`: ids as in the table.
export function groupsOf(map, wanted, order) {
  const sessions = new Map(map.sessions.map((session) => [session.id,
    {key: session.id, label: session.name, answer: session.answer, segments: []}]));
  const quarantined = {key: 'quarantined', label: 'left behind', segments: []};
  const cached = {key: 'cached', label: 'cached', segments: []};
  for (const segment of map.segments) {
    if (segment.state === 'idle') {
      cached.segments.push(segment);
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
  const places = new Map(order.map((id, place) => [id, place]));
  const placeOf = ({key}) => places.get(key) ?? order.length;
  const sorted = [...sessions.values()].sort((a, b) => placeOf(a) - placeOf(b));
  const groups = [...sorted, quarantined, cached].filter((group) => group.segments.length > 0 &&
    (wanted === null || wanted.has(group.key)));
  for (const group of groups) group.bytes = group.segments.reduce((sum, segment) => sum + segment.bytes, 0);
  return groups;
}

// About as many lines as there are groups, or more, and few of one among many; in steps, so that bars grow and shrink
// rarely.
export function lineBytesOf(groups) {
  const total = groups.reduce((sum, group) => sum + group.bytes, 0);
  const largest = groups.length <= FEW ? 0 : Math.max(...groups.map(({bytes}) => bytes));
  const wanted = Math.max(total / Math.max(LINES_WANTED, groups.length), largest / MOST_LINES, 2 ** 21);
  const power = 2 ** Math.ceil(Math.log2(wanted));
  return wanted <= 0.75 * power ? 0.75 * power : power;
}

// Adds the group's place and end, and its slices, pieces of segments that lie in one line.
function place(group, left, lineWidth, scale, slices) {
  let x = 0;
  let y = group.y + (group.narrow ? LABEL_LINE : 0);
  const nextLine = () => {
    x = 0;
    y += LINE + LINE_GAP;
  };
  for (const segment of group.segments) {
    let from = 0;
    while (from < segment.bytes) {
      const rest = Math.max(LEAST_WIDTH, (segment.bytes - from) * scale);
      const room = lineWidth - x;
      const fits = rest <= room + (room < 48 ? 0.5 : SQUEEZE);
      if (!fits && x > 0 && (rest <= lineWidth || room < 48)) {
        nextLine();
        continue;
      }
      const w = Math.min(rest, room);
      const to = fits ? segment.bytes : from + w / scale;
      slices.push({group, segment, x: left + x, y, w, from, to, scale: w / (to - from)});
      x += w + (w < SLIM ? 0.75 : BAR_GAP);
      from = to;
      if (from < segment.bytes) nextLine();
    }
  }
  group.end = y + LINE;
}

export function layOut(groups, width) {
  const narrow = width < NARROW;
  const columns = groups.length <= FEW ? 1 : Math.max(1, Math.floor((width + COLUMN_GAP) / (COLUMN + COLUMN_GAP)));
  const columnWidth = (width - (columns - 1) * COLUMN_GAP) / columns;
  const labelWidth = narrow ? 0 : LABEL;
  const lineWidth = columnWidth - labelWidth;
  const scale = lineWidth / lineBytesOf(groups);
  const slices = [];
  let [top, end] = [0, 0];  // of the row
  groups.forEach((group, i) => {
    const column = i % columns;
    if (column === 0 && i > 0) top = end + GROUP_GAP;
    Object.assign(group, {narrow, x: column * (columnWidth + COLUMN_GAP), y: top, width: columnWidth});
    place(group, group.x + labelWidth, lineWidth, scale, slices);
    end = Math.max(end, group.end);
  });
  return {groups, slices, height: end};
}
