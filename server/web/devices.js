// SPDX-License-Identifier: Apache-2.0
// The devices: what their memory is, in one bar, and the figures that matter.
import {el, keyed, setText} from './dom.js';
import {bytes, percent} from './format.js';

// Parts of a device's capacity, from left to right.
const PARTS = [
  ['allocated', 'allocated', (d) => d.allocated_bytes],
  ['held', 'held free', (d) => Math.max(0, d.leased_bytes - d.allocated_bytes)],
  ['idle', 'idle', (d) => d.idle_bytes],
  ['quarantined', 'left behind', (d) => d.left_behind_bytes],
];

const refused = (device) => Object.values(device.refusals).reduce((sum, count) => sum + count, 0);

// Name, key in the bar, what it is, text, and how urgent it is.
function figuresOf(device, waiting) {
  const fragmentation = device.fragmentation_ratio;
  return [
    ['capacity', '', 'What the daemon may hand out', bytes(device.capacity_bytes), ''],
    ['reserved', '', 'Held from the driver, by sessions or idle', bytes(device.reserved_bytes), ''],
    ['allocated', 'allocated', 'In blocks that programs use', bytes(device.allocated_bytes), ''],
    ['held free', 'held', 'Reserved by sessions, in no block', bytes(PARTS[1][2](device)), ''],
    ['idle', 'idle', 'Held by the daemon, leased to nobody', bytes(device.idle_bytes), ''],
    ['quarantined', 'left behind', 'Of sessions that are gone, not yet known to be quiet; or carried over without a session',
      bytes(device.left_behind_bytes), device.left_behind_bytes > 0 ? 'warm' : ''],
    ['carried over', '', 'Held by processes from an earlier run of the daemon', bytes(device.carried_over_bytes),
      device.carried_over_bytes > 0 ? 'warm' : ''],
    ['fragmentation', '', '1 - allocated / reserved; above 30% with much reserved is worth a look (a rule of thumb)',
      percent(fragmentation), fragmentation > 0.3 && device.reserved_bytes >= 2 ** 30 ? 'warm' : ''],
    ['waiting', '', 'Requests that wait for memory', String(waiting), waiting > 0 ? 'warm' : ''],
    ['refused', '', 'Requests refused since the daemon was started', String(refused(device)),
      refused(device) > 0 ? 'hot' : ''],
  ];
}

export function showDevices(parent, state, selected, select) {
  const many = state.devices.length > 1;
  keyed(parent, state.devices, (device) => device.device, (device) => {
    const card = el('article', {class: 'device', 'aria-label': `Device ${device.device}`},
      el('div', {class: 'device-head'},
        el('span', {class: 'name'}), el('span', {class: 'kind'}), el('span', {class: 'fault'}),
        many ? el('button', {type: 'button', 'aria-pressed': 'false'}, 'Show') : null),
      el('div', {class: 'bar', role: 'img'}, ...PARTS.map(([name]) => el('i', {class: name}))),
      el('dl', {class: 'figures'}));
    card.querySelector('button')?.addEventListener('click', () => select(device.device));
    return card;
  }, (card, device) => {
    const waiting = state.sessions.reduce((sum, s) => sum + s.devices[device.device].waiting.length, 0);
    setText(card.querySelector('.name'), `Device ${device.device}`);
    setText(card.querySelector('.kind'), `${device.kind} · ${device.name}`);
    setText(card.querySelector('.fault'), device.fault === '' ? '' : `cannot be used: ${device.fault}`);
    const shown = device.device === selected;
    card.dataset.selected = String(many && shown);
    const button = card.querySelector('button');
    if (button !== null) {
      button.setAttribute('aria-pressed', String(shown));
      setText(button, shown ? 'Shown' : 'Show');
    }
    const bar = card.querySelector('.bar');
    const texts = [];
    for (const [name, label, of] of PARTS) {
      bar.querySelector(`.${name}`).style.width = `${100 * of(device) / device.capacity_bytes}%`;
      texts.push(`${label} ${bytes(of(device))}`);
    }
    bar.setAttribute('aria-label', `Of ${bytes(device.capacity_bytes)}: ${texts.join(', ')}`);
    keyed(card.querySelector('.figures'), figuresOf(device, waiting), ([name]) => name,
      ([name, key, title]) => el('div', {title}, el('dt', {}, key === '' ? null : el('i', {class: `key ${key}`}), name),
        el('dd', {'data-figure': name.replaceAll(' ', '_')})),
      (entry, [, , , text, heat]) => {
        setText(entry.querySelector('dd'), text);
        entry.className = heat;
      });
  });
}
