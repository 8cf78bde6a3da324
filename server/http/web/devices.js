// SPDX-License-Identifier: Apache-2.0
// The devices: what their memory is, in one bar, and the figures that matter.
import {el, keyed, setText} from './dom.js';
import {SHARE_TIP, figure, figureOf, fragmentedShare, isFragmented, showBar, showFigures} from './figures.js';
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
  const sum = (processes, value) => processes.reduce((total, process) => total + value(process), 0);
  const uncounted = device.processes.filter((process) => process.kind === 'uncounted');
  const drift = sum(device.processes, (process) => process.drift_bytes);
  const names = uncounted.map((process) => `${process.name} (${process.pid}): ${bytes(process.used_bytes)}`);
  return [
    ...figureOf(sum(device.processes, (process) => process.overhead_bytes), 'overhead',
      'CUDA contexts and libraries of the daemon and its clients, which nobody is charged for. Warm: of it, ' +
      `${bytes(drift)} are more than contexts take`, bytes, {heat: drift > 0 ? 'warm' : ''}),
    ...figureOf(sum(uncounted, (process) => process.used_bytes), 'uncounted',
      `Used by processes that nobody counts: ${names.join(', ')}`, bytes, {heat: 'warm'}),
  ];
}

// Of the GPU's sensors; 0 is a reading, too.
function readingOf(value, name, tip, unit) {
  return value === null || value === undefined ? [] : [figure(name, tip, `${Math.round(value)} ${unit}`)];
}

function figuresOf(device, waiting) {
  const refused = Object.values(device.refusals).reduce((sum, count) => sum + count, 0);
  const fragmented = device.inactive_split_bytes;
  return [
    figure('free', 'Can be given to somebody now: held by nobody and not guaranteed, or cached by the daemon',
      bytes(device.free_bytes)),
    ...figureOf(device.kept_free_bytes, 'kept free', 'Held by nobody, and kept for guarantees of sessions and claims',
      bytes),
    figure('capacity', 'What the daemon may hand out', bytes(device.capacity_bytes)),
    figure('reserved', 'Held from the driver, by sessions or cached by the daemon', bytes(device.reserved_bytes)),
    ...figureOf(device.allocated_bytes, 'allocated', 'In blocks that programs use', bytes, {key: 'allocated'}),
    ...figureOf(fragmented, 'fragmented',
      'Free blocks in segments of sessions that are partly used: it cannot be given back', bytes, {key: 'fragmented'}),
    ...figureOf(fragmented, 'fragmented share', SHARE_TIP, percent(fragmentedShare(fragmented, device.leased_bytes)),
      {heat: isFragmented(fragmented, device.leased_bytes) ? 'warm' : ''}),
    ...figureOf(device.reclaimable_bytes, 'reclaimable',
      'Segments of sessions that are wholly free: sessions give it back when it is needed', bytes, {key: 'reclaimable'}),
    ...figureOf(device.unknown_bytes, 'unknown', 'Of sessions whose blocks the daemon does not know', bytes,
      {key: 'unknown'}),
    ...figureOf(device.idle_bytes, 'cached',
      'Cached by the daemon for reuse: belongs to no session, and is not fragmented', bytes, {key: 'cached'}),
    ...figureOf(device.left_behind_bytes, 'left behind',
      'Held for ended sessions until their GPU work has finished, or left from an earlier daemon', bytes,
      {key: 'quarantined', heat: 'warm'}),
    ...figureOf(device.carried_over_bytes, 'carried over', 'Held by processes from an earlier run of the daemon. In the ' +
      'bar as unknown where the daemon does not know its blocks', bytes, {heat: 'warm'}),
    ...figuresOfProcesses(device),
    ...figureOf(device.held_back_bytes, 'held back', 'Free, but kept for requests that wait', bytes),
    ...figureOf(waiting, 'waiting', 'Requests that wait for memory', String, {heat: 'warm'}),
    ...figureOf(refused, 'refused', 'Requests refused since the daemon was started', String, {heat: 'hot'}),
    ...readingOf(device.use_percent, 'GPU use', 'The share of the last moments in which a kernel ran', '%'),
    ...readingOf(device.temperature_celsius, 'temperature', 'Of the chip', '°C'),
    ...readingOf(device.power_watts, 'power', 'Drawn now', 'W'),
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
    card.querySelector('.device-head button')?.addEventListener('click', () => select(device.device));
    return card;
  }, (card, device) => {
    const waiting = sumOf(state.sessions, device.device, (held) => held.waiting.length);
    setText(card.querySelector('.name'), `Device ${device.device}`);
    setText(card.querySelector('.kind'), `${device.kind} · ${device.name}`);
    setText(card.querySelector('.fault'), device.fault === '' ? '' : `cannot be used: ${device.fault}`);
    const shown = device.device === selected;
    card.dataset.selected = String(many && shown);
    const button = card.querySelector('.device-head button');
    if (button !== null) {
      button.setAttribute('aria-pressed', String(shown));
      setText(button, shown ? 'Shown' : 'Show');
    }
    const all = {...device, reclaimable_bytes: sumOf(state.sessions, device.device, (held) => held.idle_bytes)};
    showBar(card.querySelector('.bar'), PARTS, all, device.capacity_bytes);
    showFigures(card.querySelector('.figures'), figuresOf(all, waiting));
  });
}
