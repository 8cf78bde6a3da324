// SPDX-License-Identifier: Apache-2.0
// The devices: what their memory is, in one bar, and the figures that matter.
import {el, keyed, setText} from './dom.js';
import {figure, showBar, showFigures} from './figures.js';
import {bytes, percent} from './format.js';

// What `of` adds up to on a device.
const sumOf = (sessions, device, of) => sessions.reduce((sum, session) => sum + of(session.devices[device]), 0);

// Parts of a device's capacity, from left to right.
const PARTS = [
  ['allocated', 'allocated', (d) => d.allocated_bytes],
  ['fragmented', 'fragmented', (d) => d.inactive_split_bytes],
  ['reclaimable', 'reclaimable', (d) => d.reclaimable_bytes],
  ['unknown', 'unknown', (d) => d.unknown_bytes],
  ['cached', 'cached', (d) => d.idle_bytes],
  ['quarantined', 'left behind', (d) => d.left_behind_bytes],
];

// Of GPUs whose driver tells what each process uses.
function figuresOfProcesses(device) {
  if (device.processes.length === 0) return [];
  const sum = (processes, value) => processes.reduce((total, process) => total + value(process), 0);
  const uncounted = device.processes.filter((process) => process.kind === 'uncounted');
  const drift = sum(device.processes, (process) => process.drift_bytes);
  const names = uncounted.map((process) => `${process.name} (${process.pid}): ${bytes(process.used_bytes)}`);
  return [
    figure('overhead', 'CUDA contexts and libraries of the daemon and its clients, which nobody is charged for. Warm: of it, ' +
      `${bytes(drift)} are more than contexts take`, bytes(sum(device.processes, (process) => process.overhead_bytes)),
    {heat: drift > 0 ? 'warm' : ''}),
    figure('uncounted', names.length > 0 ? `Used by processes that nobody counts: ${names.join(', ')}` :
      'Used by processes that nobody counts', bytes(sum(uncounted, (process) => process.used_bytes)),
    {heat: uncounted.length > 0 ? 'warm' : ''}),
  ];
}

function figuresOf(device, waiting) {
  const refused = Object.values(device.refusals).reduce((sum, count) => sum + count, 0);
  const fragmented = device.inactive_split_bytes;
  return [
    figure('capacity', 'What the daemon may hand out', bytes(device.capacity_bytes)),
    figure('free', 'Can be given to somebody now: held by nobody and not guaranteed, or cached by the daemon',
      bytes(device.free_bytes)),
    figure('reserved', 'Held from the driver, by sessions or cached by the daemon', bytes(device.reserved_bytes)),
    figure('allocated', 'In blocks that programs use', bytes(device.allocated_bytes), {key: 'allocated'}),
    figure('fragmented', 'Free blocks in segments of sessions that are partly used: it cannot be given back. ' +
      'Above 30% of what sessions hold it is worth a look (a rule of thumb)', bytes(fragmented),
    {key: 'fragmented', heat: fragmented > 0.3 * device.leased_bytes && device.leased_bytes >= 2 ** 30 ? 'warm' : ''}),
    figure('reclaimable', 'Segments of sessions that are wholly free: sessions give it back when it is needed',
      bytes(device.reclaimable_bytes), {key: 'reclaimable'}),
    figure('cached', 'Cached by the daemon for reuse: belongs to no session, and is not fragmentation',
      bytes(device.idle_bytes), {key: 'cached'}),
    figure('left behind', 'Held for ended sessions until their GPU work has finished, or left from an earlier daemon',
      bytes(device.left_behind_bytes), {key: 'quarantined', heat: device.left_behind_bytes > 0 ? 'warm' : ''}),
    figure('carried over', 'Held by processes from an earlier run of the daemon. In the bar as unknown where the daemon does not know its blocks', bytes(device.carried_over_bytes),
      {heat: device.carried_over_bytes > 0 ? 'warm' : ''}),
    ...figuresOfProcesses(device),
    figure('held back', 'Free, but kept for requests that wait', bytes(device.held_back_bytes)),
    figure('fragmentation', '1 - allocated / reserved of what sessions hold, as vramctl and /metrics have it; what is reclaimable counts too',
      percent(device.fragmentation_ratio)),
    figure('waiting', 'Requests that wait for memory', String(waiting), {heat: waiting > 0 ? 'warm' : ''}),
    figure('refused', 'Requests refused since the daemon was started', String(refused), {heat: refused > 0 ? 'hot' : ''}),
  ];
}

export function showDevices(parent, state, selected, select) {
  const many = state.devices.length > 1;
  keyed(parent, state.devices, (device) => device.device, (device) => {
    const card = el('article', {class: 'device', 'aria-label': `Device ${device.device}`},
      el('div', {class: 'device-head'},
        el('span', {class: 'name'}), el('span', {class: 'kind'}), el('span', {class: 'fault'}),
        many ? el('button', {type: 'button', 'aria-pressed': 'false'}, 'Show') : null),
      el('div', {class: 'bar', role: 'img'}),
      el('dl', {class: 'figures'}));
    card.querySelector('button')?.addEventListener('click', () => select(device.device));
    return card;
  }, (card, device) => {
    const waiting = sumOf(state.sessions, device.device, (held) => held.waiting.length);
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
    const all = {...device, reclaimable_bytes: sumOf(state.sessions, device.device, (held) => held.idle_bytes)};
    showBar(card.querySelector('.bar'), PARTS, all, device.capacity_bytes);
    showFigures(card.querySelector('.figures'), figuresOf(all, waiting));
  });
}
