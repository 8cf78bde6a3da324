// SPDX-License-Identifier: Apache-2.0
// The figures of one session, where the page shows it alone.
import {byId, el, keyed, setText} from './dom.js';
import {figure, showBar, showFigures} from './figures.js';
import {bytes, moment, percent} from './format.js';
import {sessionColorName} from './palette.js';
import {href, route} from './route.js';
import {detailsOf} from './search.js';
import {stateOf, waitingText} from './sessions.js';

let last = null;  // as it was when it was there

const PARTS = [
  ['allocated', 'allocated', (d) => d.allocated_bytes],
  ['fragmented', 'fragmented', (d) => d.inactive_split_bytes],
  ['reclaimable', 'reclaimable', (d) => d.idle_bytes],
  ['unknown', 'unknown', (d) => d.unknown_bytes],
];

function figuresOf(session, device) {
  const refused = device.num_ooms;
  return [
    figure('limit', 'What it may reserve at most', bytes(device.limit_bytes)),
    figure('guarantee', 'Kept free for it at all times',
      device.guarantee_bytes === 0 ? '–' : bytes(device.guarantee_bytes)),
    figure('priority', 'Who has a higher one is served first', String(session.priority)),
    figure('opened', new Date(session.started).toLocaleString(), moment(new Date(session.started))),
    figure('reserved', 'Handed to it and not given back', bytes(device.reserved_bytes),
      {heat: device.over_limit ? 'hot' : ''}),
    figure('allocated', 'In blocks that the program uses', bytes(device.allocated_bytes), {key: 'allocated'}),
    figure('fragmented', 'Free blocks in segments that are partly used: it cannot be given back',
      bytes(device.inactive_split_bytes), {key: 'fragmented'}),
    figure('reclaimable', 'In segments that are wholly free: it can be given back', bytes(device.idle_bytes),
      {key: 'reclaimable'}),
    figure('most allocated', 'Since the peaks were last reset', bytes(device.allocated_bytes_peak)),
    figure('fragmentation', '1 - allocated / reserved', percent(device.fragmentation_ratio)),
    figure('waiting', waitingText(device), String(device.waiting.length),
      {heat: device.waiting.length > 0 ? 'warm' : ''}),
    figure('refused', 'Requests that got no memory', String(refused), {heat: refused > 0 ? 'hot' : ''}),
  ];
}

// `sessions`: all that are open. Returns its name.
export function showSession(sessions, deviceIndex, devices) {
  const {session: id} = route();
  const open = sessions.find((each) => each.id === id);
  if (open !== undefined) last = open;
  const session = open ?? (last?.id === id ? last : undefined);
  const gone = byId('session-gone');
  gone.hidden = open !== undefined;
  setText(gone, session === undefined ? `There is no session ${id}. It may have ended.` :
    'This session has ended. What you see of it is its last.');
  byId('session-body').hidden = session === undefined;
  byId('session-dot').hidden = session === undefined;
  setText(byId('session-title'), session?.name ?? `Session ${id}`);
  const badge = byId('session-state');
  badge.hidden = session === undefined;
  byId('session-snapshot').hidden = open === undefined;
  if (session === undefined) return `session ${id}`;

  const device = session.devices[deviceIndex];
  const [text, heat] = open === undefined ? ['ended', 'warn'] : stateOf(session, device);
  setText(badge, text);
  badge.className = `badge ${heat}`;
  byId('session-dot').style.background = `var(${sessionColorName(id)})`;
  setText(byId('session-details'), detailsOf(session));
  byId('session-snapshot').href = `/snapshot.json?session=id:${id}`;
  showBar(byId('session-bar'), PARTS, device, Math.max(device.limit_bytes, device.reserved_bytes, 1));
  showFigures(byId('session-figures'), figuresOf(session, device));
  // It may hold memory of several devices: each leads to its own figures, map and history.
  keyed(byId('session-devices'), devices.length > 1 ? session.devices : [], (held) => held.device,
    () => el('a', {}), (link, held) => {
      setText(link, `device ${held.device}: ${bytes(held.reserved_bytes)}`);
      link.setAttribute('href', href({device: held.device}));
      link.setAttribute('aria-current', String(held.device === deviceIndex));
    });
  return session.name;
}

export const limitOf = (deviceIndex) => (last?.id === route().session ? last.devices[deviceIndex].limit_bytes : 0);
