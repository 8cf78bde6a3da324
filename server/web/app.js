// SPDX-License-Identifier: Apache-2.0
// Asks the daemon again and again, and hands each part of the page its part of the answers.
import {byId, setText} from './dom.js';
import {showDevices} from './devices.js';
import {clock, duration, percent} from './format.js';
import {chooseInMap, showMap, startMap} from './map.js';
import {showOoms} from './ooms.js';
import {assignColors, onThemeChange, startTheme} from './palette.js';
import {showSessions, startSessions} from './sessions.js';
import {showTimeline, startTimeline} from './timeline.js';

const STATE_MS = 1000;
const MAP_MS = 1050;  // clients are asked once a second
const TIMELINE_MS = 2000;
const PATIENCE_MS = 4000;  // with an answer
const STALE_MS = 3500;     // figures older than this are said to be old
const LOST_MS = 8000;

let state = null;      // of /api/v1/state
let received = 0;      // when it came, by performance.now()
let receivedAt = null; // ... by the clock
let why = '';          // the last question had no answer
let device = 0;        // that is shown
let chosen = null;     // the session that is shown alone
let oomsShown = -1;    // of total_ooms

async function ask(path) {
  const response = await fetch(path, {signal: AbortSignal.timeout(PATIENCE_MS)});
  if (!response.ok) throw new Error(`${path}: ${response.status} ${(await response.text()).trim()}`);
  return response.json();
}

// Asks every `period` ms, one question at a time, and not while nobody looks.
function every(period, question) {
  const next = async () => {
    const started = performance.now();
    if (!document.hidden) {
      try {
        await question();
        why = '';
      } catch (error) {
        why = error.name === 'TimeoutError' ? 'it takes longer than 4 s to answer' : error.message;
      }
    }
    setTimeout(next, Math.max(100, period - (performance.now() - started)));
  };
  next();
}

function choose(session) {
  chosen = session === chosen ? null : session;
  chooseInMap(chosen);
  byId('map-clear').hidden = chosen === null;
  if (state !== null) show();
}

function select(ordinal) {
  device = ordinal;
  askMap().catch(() => {});
  askTimeline().catch(() => {});
  show();
}

function show() {
  assignColors(state.sessions);
  if (chosen !== null && !state.sessions.some((session) => session.id === chosen)) choose(chosen);
  setText(byId('version'), state.daemon_version);
  showDevices(byId('devices'), state, device, select);
  showSessions(byId('sessions'), byId('sessions-note'), byId('sessions-empty'), state.sessions, device, chosen, choose);
  const {reserved_bytes: reserved, capacity_bytes: capacity} = state.devices[device];
  document.title = `${percent(reserved / capacity)} reserved · vrambroker`;
}

async function askState() {
  state = await ask('/api/v1/state');
  received = performance.now();
  receivedAt = new Date();
  show();
  if (state.total_ooms !== oomsShown) {
    const answer = await ask('/api/v1/ooms');
    oomsShown = answer.total_events;
    showOoms(byId('ooms'), byId('ooms-note'), byId('ooms-empty'), answer);
  }
}

async function askMap() {
  const wanted = device;
  const map = await ask(`/api/v1/map?device=${wanted}`);
  if (wanted === device) showMap(map);
}

async function askTimeline() {
  const wanted = device;
  const timeline = await ask(`/api/v1/timeline?device=${wanted}`);
  if (wanted === device) showTimeline(byId('timeline'), byId('timeline-note'), timeline);
}

// Says how old the figures are.
function showAge() {
  const status = byId('status');
  const alert = byId('alert');
  const age = state === null ? performance.now() : performance.now() - received;
  const old = age > STALE_MS && !document.hidden;
  const lost = old && (age > LOST_MS || state === null);
  byId('main').className = old ? 'stale' : '';
  const kind = old ? (lost ? 'lost' : 'stale') : state === null ? 'waiting' : 'live';
  status.dataset.state = kind;
  setText(status, {live: 'live', waiting: 'connecting', stale: 'slow', lost: 'no answer'}[kind]);
  let text = '';
  if (lost) {
    text = state === null ? 'The daemon does not answer.' :
      `The daemon does not answer. What you see is from ${clock(receivedAt)}, ${duration(age)} ago.`;
    if (why !== '') text += ` (${why})`;
  } else if (state !== null && state.health !== 'ok') {
    text = `The daemon says: ${state.health}`;
  }
  // The seconds that go by are not news to screen readers.
  alert.setAttribute('aria-live', lost ? 'off' : 'assertive');
  alert.hidden = text === '';
  setText(alert, text);
}

startTheme(byId('theme'));
startMap(choose);
startSessions(byId('sessions'), () => state !== null && show());
startTimeline(byId('timeline'));
onThemeChange(() => state !== null && show());
byId('map-clear').addEventListener('click', () => choose(chosen));
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && chosen !== null) choose(chosen);
});
every(STATE_MS, askState);
every(MAP_MS, askMap);
every(TIMELINE_MS, askTimeline);
setInterval(showAge, 250);
