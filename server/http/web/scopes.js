// SPDX-License-Identifier: Apache-2.0
// Scopes: the names that a program gives to parts of its work. Blocks say in which one they were allocated, where the
// program uses scopes.
import {el, keyed, setText} from './dom.js';
import {bytes, plural} from './format.js';

const sessionOf = (map, session) => map.sessions.find(({id}) => id === session);

// Of block `i` in `segment`; undefined: none. `map`: an answer of /api/v1/map.
export function scopeOf(map, segment, i) {
  return sessionOf(map, segment.session_id)?.scopes?.[segment.block_scopes?.[i] ?? 0] || undefined;
}

// What each scope of a session has, most bytes first, and how many more scopes there are; null: it uses none.
export function scopesIn(map, session) {
  const {scope_uses: uses = [], more_scope_uses: more = 0} = sessionOf(map, session) ?? {};
  if (uses.every(({scope}) => scope === '')) return null;
  const sorted = [...uses].sort((a, b) => b.allocated_bytes - a.allocated_bytes || b.bytes_at_peak - a.bytes_at_peak);
  return {uses: sorted, more};
}

// Columns: heading, class, what it is.
const COLUMNS = [
  ['Scope', '', 'What the program calls this part of its work'],
  ['Bytes now', 'number', 'In its blocks in use, without those of scopes within it'],
  ['At peak', 'number', 'The same when the session’s allocated bytes were at their peak'],
  ['Blocks', 'number', 'In use'],
  ['Pins holes', 'number', 'Fragmented: free blocks of the segments that its blocks keep from being given back. ' +
    'Several scopes can pin the same hole'],
];
const SHARE = ['Share', 'share', 'Of the bytes in use now'];

// A table of scopes without rows.
export function scopeTable(properties, columns = COLUMNS) {
  return el('table', {...properties, class: 'plain'},
    el('thead', {}, el('tr', {}, ...columns.map(([heading, kind, tip]) =>
      el('th', {scope: 'col', class: kind}, el('button', {type: 'button', class: 'term', 'data-tip': tip}, heading))))),
    el('tbody'));
}

// `of`: the scope that is marked, of a request.
export function showUses(table, uses, of = '') {
  const all = uses.reduce((sum, use) => sum + use.allocated_bytes, 0);
  const shares = table.tHead.rows[0].cells.length > COLUMNS.length;
  keyed(table.tBodies[0], uses, ({scope}) => `:${scope}`, ({scope}) => el('tr', {},
    el('th', {scope: 'row', class: scope === '' ? 'none' : ''}, scope === '' ? 'in no scope' : scope,
      scope !== '' && scope === of ? el('small', {}, ' the request’s') : null),
    ...COLUMNS.slice(1).map(([, kind]) => el('td', {class: kind})),
    shares ? el('td', {class: 'share'},
      el('div', {class: 'meter', 'aria-hidden': 'true'}, el('i', {class: 'allocated'}))) : null),
  (row, use) => {
    const figures = [bytes(use.allocated_bytes), bytes(use.bytes_at_peak), String(use.blocks),
      bytes(use.pinned_hole_bytes)];
    figures.forEach((text, i) => setText(row.cells[i + 1], text));
    if (shares) row.querySelector('i').style.width = `${all === 0 ? 0 : 100 * use.allocated_bytes / all}%`;
  });
}

// `scopes`: of scopesIn().
export function showScopes(panel, box, note, scopes) {
  panel.hidden = scopes === null;
  if (scopes === null) return;
  if (box.firstElementChild === null) box.append(scopeTable({id: 'scopes'}, [...COLUMNS, SHARE]));
  const {uses, more} = scopes;
  const all = uses.reduce((sum, use) => sum + use.allocated_bytes, 0);
  const named = plural(uses.filter(({scope}) => scope !== '').length, 'scope');
  setText(note, `${named} · ${bytes(all)} in blocks` + (more === 0 ? '' : ` · ${plural(more, 'smaller scope')} left out`));
  showUses(box.firstElementChild, uses);
}
