// SPDX-License-Identifier: Apache-2.0
// The figures of one session, where the page shows it alone.
import {byId, el, keyed, setText} from './dom.js';
import {SHARE_TIP, figure, figureOf, fragmentedShare, isFragmented, showBar, showFigures} from './figures.js';
import {bytes, duration, moment, percent} from './format.js';
import {sessionColorName} from './palette.js';
import {href, route, shownAmong} from './route.js';
import {factsOf} from './search.js';
import {AGE_TIP, IDLE_TIP, ageOf, stateOf, waitingText} from './sessions.js';

let last = null;  // {run, session}: as it was when it was there; and when that was
let seen = 0;

const PARTS = [
  ['allocated', 'allocated', (d) => d.allocated_bytes],
  ['fragmented', 'fragmented', (d) => d.inactive_split_bytes],
  ['reclaimable', 'reclaimable', (d) => d.idle_bytes],
  ['unknown', 'unknown', (d) => d.unknown_bytes],
];

function figuresOf(session, device, now) {
  const fragmented = device.inactive_split_bytes;
  const opened = moment(new Date(session.started));
  return [
    figure('reserved', 'Handed to it and not given back', bytes(device.reserved_bytes),
      {heat: device.over_limit ? 'hot' : ''}),
    figure('limit', 'What it may reserve at most', bytes(device.limit_bytes)),
    ...figureOf(device.allocated_bytes, 'allocated', 'In blocks that the program uses', bytes, {key: 'allocated'}),
    ...figureOf(fragmented, 'fragmented', 'Free blocks in segments that are partly used: it cannot be given back', bytes,
      {key: 'fragmented'}),
    ...figureOf(fragmented, 'fragmented share', SHARE_TIP, percent(fragmentedShare(fragmented, device.reserved_bytes)),
      {heat: isFragmented(fragmented, device.reserved_bytes) ? 'warm' : ''}),
    ...figureOf(device.idle_bytes, 'reclaimable', 'In segments that are wholly free: it can be given back', bytes,
      {key: 'reclaimable'}),
    ...figureOf(device.unknown_bytes, 'unknown', 'The daemon does not know its blocks', bytes, {key: 'unknown'}),
    ...figureOf(device.allocated_bytes_peak, 'most allocated', 'Since the peaks were last reset', bytes),
    ...figureOf(device.guarantee_bytes, 'guarantee', 'Kept free for it at all times', bytes),
    ...figureOf(session.priority, 'priority', 'Who has a higher one is served first', String),
    ...figureOf(device.waiting.length, 'waiting', waitingText(device), String, {heat: 'warm'}),
    ...figureOf(device.num_ooms, 'refused', 'Requests that got no memory', String, {heat: 'hot'}),
    figure('age', `${AGE_TIP}: ${opened}`, duration(ageOf(session, now))),
    ...figureOf(typeof session.idle_ms === 'number', 'last use', IDLE_TIP, `${duration(session.idle_ms)} ago`),
  ];
}

// The session of the address, as it was when it was there last.
const lastShown = () =>
  (last?.session.id === route().session && last.run === route().run ? last.session : undefined);

// Returns its name. `time`: of the state.
export function showSession({sessions, devices, time}, deviceIndex) {
  const {session: id, run} = route();
  const open = shownAmong(sessions);
  if (open !== undefined) [last, seen] = [{run, session: open}, Date.parse(time)];
  const session = lastShown();
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
  byId('session-dot').style.background = `var(${open === undefined ? '--muted' : sessionColorName(id)})`;
  setText(byId('session-details'), factsOf(session));
  byId('session-snapshot').href = `/snapshot.json?session=id:${id}`;
  showBar(byId('session-bar'), PARTS, device, Math.max(device.limit_bytes, device.reserved_bytes, 1));
  showFigures(byId('session-figures'), figuresOf(session, device, seen));
  // It may hold memory of several devices: each leads to its own figures, map and history.
  keyed(byId('session-devices'), devices.length > 1 ? session.devices : [], (held) => held.device,
    () => el('a', {}), (link, held) => {
      setText(link, `device ${held.device}: ${bytes(held.reserved_bytes)}`);
      link.setAttribute('href', href({device: held.device}));
      link.setAttribute('aria-current', String(held.device === deviceIndex));
    });
  return session.name;
}

export const limitOf = (deviceIndex) => lastShown()?.devices[deviceIndex].limit_bytes ?? 0;
