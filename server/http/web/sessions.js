// SPDX-License-Identifier: Apache-2.0
// The table of sessions on one device, by claim: sortable, and a session opens into a view of its own.
import {heldBySessions, rowsOf, toggle} from './claims.js';
import {byId, el, keyed, setText} from './dom.js';
import {SHARE_TIP, fragmentedShare, isFragmented} from './figures.js';
import {bytes, duration, percent, plural} from './format.js';
import {sessionColorName} from './palette.js';
import {go, href, keep, route} from './route.js';
import {detailsOf} from './search.js';

export const AGE_TIP = 'Since the session was opened';
export const IDLE_TIP = 'Since it last allocated or freed memory, as far as its client has said';

export const ageOf = (session, now) => now - Date.parse(session.started);
const shareOf = (held) => fragmentedShare(held.inactive_split_bytes, heldBySessions(held));

// Key in the address, heading, class, what to sort by, and what it is; cells in the same order.
const COLUMNS = [
  ['name', 'Session', '', (s) => s.name, ''],
  ['reserved', 'Reserved of limit', '', (s, d) => d.reserved_bytes, ''],
  ['allocated', 'Allocated', 'number', (s, d) => d.allocated_bytes, 'In blocks that the program uses'],
  ['reclaimable', 'Reclaimable', 'number', (s, d) => d.idle_bytes,
    'In segments that are wholly free: it can be given back'],
  ['fragmented', 'Fragmented', 'number', (s, d) => d.inactive_split_bytes,
    'Free blocks in segments that are partly used: it cannot be given back'],
  ['fragmented_share', 'Frag', 'number', (s, d) => shareOf(d), SHARE_TIP],
  ['guarantee', 'Guarantee', 'number', (s, d) => d.guarantee_bytes, 'Kept free for the session at all times'],
  ['waiting', 'Waiting', '', (s, d) => (d.waiting.length === 0 ? -1 : d.waiting[0].waited_ms), ''],
  ['refused', 'Refused', 'number', (s, d) => d.num_ooms, ''],
  ['state', 'State', '', (s, d) => stateOf(s, d)[0], ''],
  ['last_use', 'Last use', 'number', (s) => s.idle_ms ?? Infinity, IDLE_TIP],
  ['age', 'Age', 'number', (s) => -Date.parse(s.started ?? 0), AGE_TIP],
];

export function stateOf(session, device) {
  if (device.over_limit && session.state === 'active') return ['over limit', 'bad'];
  return [session.state, {active: 'good', disconnected: 'warn', draining: 'warn', revoked: 'warn'}[session.state] ?? ''];
}

export function waitingText(device) {
  if (device.waiting.length === 0) return '–';
  const first = device.waiting[0];
  const more = device.waiting.length > 1 ? `, ${device.waiting.length - 1} more` : '';
  return `${bytes(first.bytes)} for ${duration(first.waited_ms)} (place ${first.place})${more}`;
}

// The column that the table is sorted by, and how.
function sorting() {
  const {sort} = route();
  const column = COLUMNS.findIndex(([key]) => key === sort.replace(/^-/, ''));
  return column < 0 ? [1, false] : [column, !sort.startsWith('-')];
}

// Roles are said where the style sheet makes cards of rows: such a table is none to browsers.
export function startSessions(table, choice) {
  const row = el('tr', {role: 'row'});
  choice.append(...COLUMNS.map(([key, heading]) => el('option', {value: key}, heading)));
  choice.addEventListener('change', () => keep({sort: (choice.value === 'name' ? '' : '-') + choice.value}));
  COLUMNS.forEach(([key, heading, kind, , tip], column) => {
    const button = el('button', {type: 'button', 'data-tip': tip === '' ? null : tip}, heading);
    button.addEventListener('click', () => {
      const [sortBy, ascending] = sorting();
      const up = sortBy === column ? !ascending : column === 0;
      keep({sort: (up ? '' : '-') + key});
    });
    row.append(el('th', {scope: 'col', class: kind, role: 'columnheader'}, button));
  });
  table.tHead.append(row);
}

function createRow({session, claim}) {
  const cells = COLUMNS.slice(2).map(([, heading, kind]) => el('td', {class: kind, role: 'cell', 'data-label': heading}));
  const row = el('tr', {role: 'row'},
    el('th', {scope: 'row', role: 'rowheader'},
      claim === undefined ? el('a', {}, el('i', {class: 'dot'}), el('span')) :
        el('button', {type: 'button'}, el('i', {class: 'fold', 'aria-hidden': 'true'}), el('span')),
      el('small')),
    el('td', {class: 'usage', role: 'cell'},
      el('div', {class: 'text'}, el('b'), el('span')),
      el('div', {class: 'meter', 'aria-hidden': 'true'},
        el('i', {class: 'reserved'}), el('i', {class: 'allocated'}), el('i', {class: 'guarantee'}))),
    ...cells);
  // All of the row, but not for who selects text in it.
  row.addEventListener('click', (event) => {
    if (event.target.closest('a') !== null || !getSelection().isCollapsed) return;
    if (claim === undefined) {
      go({session: session.id});
    } else {
      toggle(claim);
    }
  });
  return row;
}

function updateName(row, name, {session, claim, isCollapsed, isInClaim}) {
  setText(name.querySelector('span'), session.name);
  if (claim !== undefined) {
    row.className = 'claim';
    row.dataset.claim = claim.name;
    name.querySelector('button').setAttribute('aria-expanded', String(!isCollapsed));
    setText(name.querySelector('small'), session.details);
    return;
  }
  row.className = isInClaim ? 'in-claim' : '';
  row.dataset.session = String(session.id);
  name.querySelector('a').setAttribute('href', href({session: session.id}));
  name.querySelector('.dot').style.background = `var(${sessionColorName(session.id)})`;
  setText(name.querySelector('small'), detailsOf(session));
}

// `nothing`: figures that are zero stand back.
function setFigure(cell, text, nothing, heat = '') {
  setText(cell, text);
  cell.className = ['number', nothing ? 'nothing' : heat].join(' ').trim();
}

function updateRow(row, entry, deviceIndex, now) {
  const {session} = entry;
  const device = session.devices[deviceIndex];
  const color = entry.claim === undefined ? `var(${sessionColorName(session.id)})` : 'var(--allocated)';
  const [name, usage, allocated, reclaimable, fragmented, share, guarantee, waiting, ooms, state, lastUse, age] = row.cells;
  updateName(row, name, entry);

  const limit = Math.max(device.limit_bytes, device.reserved_bytes, 1);
  const full = device.limit_bytes > 0 && device.reserved_bytes >= 0.9 * device.limit_bytes;
  setText(usage.querySelector('b'), bytes(device.reserved_bytes));
  usage.querySelector('b').className = device.over_limit ? 'bad-text' : full ? 'warn-text' : '';
  setText(usage.querySelector('.text span'), `of ${bytes(device.limit_bytes)}`);
  for (const [part, value] of [['reserved', device.reserved_bytes], ['allocated', device.allocated_bytes]]) {
    const element = usage.querySelector(`.${part}`);
    element.style.width = `${100 * value / limit}%`;
    element.style.background = color;
  }
  const mark = usage.querySelector('.guarantee');
  mark.hidden = device.guarantee_bytes === 0;
  mark.style.left = `min(${100 * device.guarantee_bytes / limit}%, 100% - 2px)`;

  for (const [cell, value] of [[allocated, device.allocated_bytes], [reclaimable, device.idle_bytes],
    [fragmented, device.inactive_split_bytes]]) {
    setFigure(cell, bytes(value), value === 0);
  }
  setFigure(share, percent(shareOf(device)), device.inactive_split_bytes === 0,
    isFragmented(device.inactive_split_bytes, heldBySessions(device)) ? 'warn-text' : '');
  setFigure(guarantee, device.guarantee_bytes === 0 ? '–' : bytes(device.guarantee_bytes), device.guarantee_bytes === 0);
  setText(waiting, waitingText(device));
  waiting.className = device.waiting.length > 0 ? 'warn-text' : 'nothing';
  setFigure(ooms, String(device.num_ooms), device.num_ooms === 0, 'bad-text');
  const isUseKnown = typeof session.idle_ms === 'number';
  setFigure(lastUse, isUseKnown ? `${duration(session.idle_ms)} ago` : '–', !isUseKnown);
  setFigure(age, session.started === undefined ? '–' : duration(ageOf(session, now)), session.started === undefined);
  const [stateText, heat] = stateOf(session, device);
  if (state.firstChild === null) state.append(el('span'));
  setText(state.firstChild, stateText);
  state.firstChild.className = `badge ${heat}`;
}

// `sessions`: those of `state` that match the search. Returns their ids in the order of the table.
export function showSessions(table, note, empty, sessions, state, deviceIndex) {
  const [sortBy, ascending] = sorting();
  const value = COLUMNS[sortBy][3];
  const {rows, order} = rowsOf(sessions, state, route().search, deviceIndex, (a, b) => {
    const left = value(a, a.devices[deviceIndex]);
    const right = value(b, b.devices[deviceIndex]);
    const difference = typeof left === 'string' ? left.localeCompare(right) : left === right ? 0 : left - right;
    return (ascending ? difference : -difference) || a.id - b.id || a.name.localeCompare(b.name);
  });
  byId('sort').value = COLUMNS[sortBy][0];
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    if (column === sortBy) {
      cell.setAttribute('aria-sort', ascending ? 'ascending' : 'descending');
    } else {
      cell.removeAttribute('aria-sort');
    }
    setText(cell.firstChild, COLUMNS[column][1] + (column === sortBy ? (ascending ? ' ↑' : ' ↓') : ''));
  });
  keyed(table.tBodies[0], rows, ({key}) => key, createRow, (row, entry) =>
    updateRow(row, entry, deviceIndex, Date.parse(state.time)));
  empty.hidden = rows.length > 0;
  table.hidden = rows.length === 0;
  const all = state.sessions;
  const found = sessions.length === all.length ? '' : `${sessions.length} of `;
  setText(note, (all.length === 0 ? [] : [found + plural(all.length, 'session')])
    .concat(state.claims.length === 0 ? [] : [plural(state.claims.length, 'claim')]).join(' · '));
  return order;
}
