// SPDX-License-Identifier: Apache-2.0
// The table of sessions on one device, by claim: sortable, and a session opens into a view of its own.
import {rowsOf, toggle} from './claims.js';
import {el, keyed, setText} from './dom.js';
import {bytes, duration, percent, plural} from './format.js';
import {sessionColorName} from './palette.js';
import {go, href, keep, route} from './route.js';
import {detailsOf} from './search.js';

// Key in the address, heading, class, what to sort by, and what it is; cells in the same order.
const COLUMNS = [
  ['name', 'Session', '', (s) => s.name, ''],
  ['reserved', 'Reserved of limit', '', (s, d) => d.reserved_bytes, ''],
  ['allocated', 'Allocated', 'number', (s, d) => d.allocated_bytes, 'In blocks that the program uses'],
  ['reclaimable', 'Reclaimable', 'number', (s, d) => d.idle_bytes,
    'In segments that are wholly free: it can be given back'],
  ['fragmented', 'Fragmented', 'number', (s, d) => d.inactive_split_bytes,
    'Free blocks in segments that are partly used: it cannot be given back'],
  ['fragmentation', 'Fragmentation', 'number', (s, d) => d.fragmentation_ratio, '1 - allocated / reserved'],
  ['guarantee', 'Guarantee', 'number', (s, d) => d.guarantee_bytes, 'Kept free for the session at all times'],
  ['waiting', 'Waiting', '', (s, d) => (d.waiting.length === 0 ? -1 : d.waiting[0].waited_ms), ''],
  ['refused', 'Refused', 'number', (s, d) => d.num_ooms, ''],
  ['state', 'State', '', (s, d) => stateOf(s, d)[0], ''],
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

export function startSessions(table) {
  const row = el('tr');
  COLUMNS.forEach(([key, heading, kind, , title], column) => {
    const button = el('button', {type: 'button', title: title === '' ? null : title}, heading);
    button.addEventListener('click', () => {
      const [sortBy, ascending] = sorting();
      const up = sortBy === column ? !ascending : column === 0;
      keep({sort: (up ? '' : '-') + key});
    });
    row.append(el('th', {scope: 'col', class: kind}, button));
  });
  table.tHead.append(row);
}

function createRow({session, claim}) {
  const cells = COLUMNS.slice(2).map(([, , kind]) => el('td', {class: kind}));
  const row = el('tr', {},
    el('th', {scope: 'row'},
      claim === undefined ? el('a', {}, el('i', {class: 'dot'}), el('span')) :
        el('button', {type: 'button'}, el('i', {class: 'fold', 'aria-hidden': 'true'}), el('span')),
      el('small')),
    el('td', {class: 'usage'},
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

function updateRow(row, entry, deviceIndex) {
  const {session} = entry;
  const device = session.devices[deviceIndex];
  const color = entry.claim === undefined ? `var(${sessionColorName(session.id)})` : 'var(--allocated)';
  const [name, usage, allocated, reclaimable, fragmented, fragmentation, guarantee, waiting, ooms, state] = row.cells;
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

  setText(allocated, bytes(device.allocated_bytes));
  setText(reclaimable, bytes(device.idle_bytes));
  setText(fragmented, bytes(device.inactive_split_bytes));
  setText(fragmentation, percent(device.fragmentation_ratio));
  setText(guarantee, device.guarantee_bytes === 0 ? '–' : bytes(device.guarantee_bytes));
  setText(waiting, waitingText(device));
  waiting.className = device.waiting.length > 0 ? 'warn-text' : '';
  setText(ooms, String(device.num_ooms));
  ooms.className = device.num_ooms > 0 ? 'number bad-text' : 'number';
  const [stateText, heat] = stateOf(session, device);
  if (state.firstChild === null) state.append(el('span'));
  setText(state.firstChild, stateText);
  state.firstChild.className = `badge ${heat}`;
}

// `sessions`: those of `state` that match the search.
export function showSessions(table, note, empty, sessions, state, deviceIndex) {
  const [sortBy, ascending] = sorting();
  const value = COLUMNS[sortBy][3];
  const rows = rowsOf(sessions, state, route().search, deviceIndex, (a, b) => {
    const left = value(a, a.devices[deviceIndex]);
    const right = value(b, b.devices[deviceIndex]);
    const order = typeof left === 'string' ? left.localeCompare(right) : left - right;
    return (ascending ? order : -order) || a.id - b.id || a.name.localeCompare(b.name);
  });
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    if (column === sortBy) {
      cell.setAttribute('aria-sort', ascending ? 'ascending' : 'descending');
    } else {
      cell.removeAttribute('aria-sort');
    }
    setText(cell.firstChild, COLUMNS[column][1] + (column === sortBy ? (ascending ? ' ↑' : ' ↓') : ''));
  });
  keyed(table.tBodies[0], rows, ({key}) => key, createRow, (row, entry) => updateRow(row, entry, deviceIndex));
  empty.hidden = rows.length > 0;
  table.hidden = rows.length === 0;
  const all = state.sessions;
  const found = sessions.length === all.length ? '' : `${sessions.length} of `;
  setText(note, (all.length === 0 ? [] : [found + plural(all.length, 'session')])
    .concat(state.claims.length === 0 ? [] : [plural(state.claims.length, 'claim')]).join(' · '));
}
