// SPDX-License-Identifier: Apache-2.0
// Scopes: the names that a program gives to parts of its work. Blocks say in which one they were allocated, where the
// program uses scopes.
import {el, keyed, setText} from './dom.js';
import {bytes, plural} from './format.js';

// The scopes of a session, by the numbers that its blocks have for them. `map`: an answer of /api/v1/map.
const listOf = (map, session) => map.sessions.find(({id}) => id === session)?.scopes ?? [];

// Of block `i` in `segment`; undefined: none.
export function scopeOf(map, segment, i) {
  return listOf(map, segment.session_id)[segment.block_scopes?.[i] ?? 0] || undefined;
}

// What a session's used blocks add up to, by scope, most bytes first; null: no block has one.
export function scopesIn(map, session) {
  const list = listOf(map, session);
  const sums = new Map();
  for (const {session_id: holder, blocks, block_scopes: scopes} of map.segments) {
    if (holder !== session || blocks === undefined) continue;
    for (let i = 0; 3 * i < blocks.length; ++i) {
      if (blocks[3 * i + 2] === 0) continue;  // free
      const scope = list[scopes?.[i] ?? 0] || undefined;
      if (!sums.has(scope)) sums.set(scope, {scope, bytes: 0, blocks: 0});
      const sum = sums.get(scope);
      sum.bytes += blocks[3 * i];
      ++sum.blocks;
    }
  }
  if ([...sums.keys()].every((scope) => scope === undefined)) return null;
  return [...sums.values()].sort((a, b) => b.bytes - a.bytes);
}

export function showScopes(panel, table, note, scopes) {
  panel.hidden = scopes === null;
  if (scopes === null) return;
  const all = scopes.reduce((sum, scope) => sum + scope.bytes, 0);
  setText(note, `${plural(scopes.filter(({scope}) => scope !== undefined).length, 'scope')} · ${bytes(all)} in blocks`);
  keyed(table.tBodies[0], scopes, ({scope}) => (scope === undefined ? '' : `:${scope}`), ({scope}) => el('tr', {},
    el('th', {scope: 'row', class: scope === undefined ? 'none' : ''}, scope ?? 'in no scope'),
    el('td', {class: 'number'}), el('td', {class: 'number'}),
    el('td', {class: 'share'}, el('div', {class: 'meter', 'aria-hidden': 'true'}, el('i', {class: 'allocated'})))),
  (row, sum) => {
    setText(row.cells[1], bytes(sum.bytes));
    setText(row.cells[2], String(sum.blocks));
    row.querySelector('i').style.width = `${100 * sum.bytes / all}%`;
  });
}
