// SPDX-License-Identifier: Apache-2.0
// The table of sessions on one device: sortable, and a session's name shows it alone in the map.
import {el, keyed, setText} from './dom.js';
import {bytes, duration, percent, plural} from './format.js';
import {sessionColorName} from './palette.js';

// Heading, class, and what to sort by; cells in the same order.
const COLUMNS = [
  ['Session', '', (s) => s.name],
  ['Reserved of limit', '', (s, d) => d.reserved_bytes],
  ['Allocated', 'number', (s, d) => d.allocated_bytes],
  ['Idle', 'number', (s, d) => d.idle_bytes],
  ['Fragmentation', 'number', (s, d) => d.fragmentation_ratio],
  ['Guarantee', 'number', (s, d) => d.guarantee_bytes],
  ['Waiting', '', (s, d) => (d.waiting.length === 0 ? -1 : d.waiting[0].waited_ms)],
  ['Refused', 'number', (s, d) => d.num_ooms],
  ['State', '', (s, d) => stateOf(s, d)[0]],
];

function stateOf(session, device) {
  if (device.over_limit) return ['over limit', 'bad'];
  return [session.state, {active: 'good', disconnected: 'warn'}[session.state] ?? ''];
}

function waitingText(device) {
  if (device.waiting.length === 0) return '–';
  const first = device.waiting[0];
  const more = device.waiting.length > 1 ? `, ${device.waiting.length - 1} more` : '';
  return `${bytes(first.bytes)} for ${duration(first.waited_ms)} (place ${first.place})${more}`;
}

let sortBy = 1;
let ascending = false;

export function startSessions(table, sorted) {
  const row = el('tr');
  COLUMNS.forEach(([heading, kind], column) => {
    const button = el('button', {type: 'button'}, heading);
    button.addEventListener('click', () => {
      ascending = sortBy === column ? !ascending : column === 0;
      sortBy = column;
      sorted();
    });
    row.append(el('th', {scope: 'col', class: kind}, button));
  });
  table.tHead.append(row);
}

function createRow(session, choose) {
  const name = el('button', {type: 'button', title: 'Show this session alone in the map'},
    el('i', {class: 'dot'}), el('span'));
  name.addEventListener('click', () => choose(session.id));
  const cells = COLUMNS.slice(2).map(([, kind]) => el('td', {class: kind}));
  return el('tr', {},
    el('th', {scope: 'row'}, name, el('small')),
    el('td', {class: 'usage'},
      el('div', {class: 'text'}, el('b'), el('span')),
      el('div', {class: 'meter', 'aria-hidden': 'true'},
        el('i', {class: 'reserved'}), el('i', {class: 'allocated'}), el('i', {class: 'guarantee'}))),
    ...cells);
}

function updateRow(row, session, deviceIndex, chosen) {
  const device = session.devices[deviceIndex];
  const color = `var(${sessionColorName(session.id)})`;
  const [name, usage, allocated, idle, fragmentation, guarantee, waiting, ooms, state] = row.cells;
  row.dataset.chosen = String(session.id === chosen);
  row.dataset.session = String(session.id);
  setText(name.querySelector('span'), session.name);
  name.querySelector('button').setAttribute('aria-pressed', String(session.id === chosen));
  name.querySelector('.dot').style.background = color;
  setText(name.querySelector('small'),
    `id ${session.id} · pid ${session.pid} · ${session.tenant === `uid:${session.uid}` ? '' : `uid ${session.uid} · `}` +
    session.tenant);

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
  setText(idle, bytes(device.idle_bytes));
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

export function showSessions(table, note, empty, sessions, deviceIndex, chosen, choose) {
  const value = COLUMNS[sortBy][2];
  const sorted = [...sessions].sort((a, b) => {
    const left = value(a, a.devices[deviceIndex]);
    const right = value(b, b.devices[deviceIndex]);
    const order = typeof left === 'string' ? left.localeCompare(right) : left - right;
    return (ascending ? order : -order) || a.id - b.id;
  });
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    if (column === sortBy) {
      cell.setAttribute('aria-sort', ascending ? 'ascending' : 'descending');
    } else {
      cell.removeAttribute('aria-sort');
    }
    setText(cell.firstChild, COLUMNS[column][0] + (column === sortBy ? (ascending ? ' ↑' : ' ↓') : ''));
  });
  keyed(table.tBodies[0], sorted, (session) => session.id, (session) => createRow(session, choose),
    (row, session) => updateRow(row, session, deviceIndex, chosen));
  empty.hidden = sessions.length > 0;
  table.hidden = sessions.length === 0;
  setText(note, sessions.length === 0 ? '' : plural(sessions.length, 'session'));
}
