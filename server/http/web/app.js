// SPDX-License-Identifier: Apache-2.0
// Asks the daemon again and again, and hands each part of the page its part of the answers.
import {byId, setText} from './dom.js';
import {showDevices} from './devices.js';
import {clock, duration, percent, plural} from './format.js';
import {historyOf, remember} from './history.js';
import {showInMap, showMap, startMap} from './map.js';
import {watchMore} from './more.js';
import {showOoms} from './ooms.js';
import {assignColors, onThemeChange, startTheme} from './palette.js';
import {go, href, isOfThisRun, keep, route, setRun, shownAmong, startRoute} from './route.js';
import {scopesIn, showScopes} from './scopes.js';
import {matches, showSearch, startSearch} from './search.js';
import {limitOf, showSession} from './session_view.js';
import {showSessions, startSessions} from './sessions.js';
import {showHistory, showTimeline, startTimeline} from './timeline.js';
import {startTips} from './tips.js';

const STATE_MS = 1000;
const MAP_MS = 1050;  // clients are asked once a second
const TIMELINE_MS = 2000;
const UNSEEN_MS = 10_000;  // between looks while nobody looks, for the histories; browsers may make it a minute
const PATIENCE_MS = 4000;  // with an answer
const RETRY_MS = 30_000;   // after the daemon has said that it has no history of a session
const GAP_MS = 10_000;     // nobody knows what was between answers that are further apart
const UNSEEN_GAP_MS = 75_000;
const STALE_MS = 3500;     // figures older than this are said to be old
const LOST_MS = 8000;

let state = null;      // of /api/v1/state
let map = null;        // of /api/v1/map
let received = 0;      // when the state came, by performance.now()
let receivedAt = null; // ... by the clock
let why = '';          // the last question had no answer
let wasHidden = document.hidden;  // since the last answer
let oomsShown = '';    // whose, of which run of the daemon, and how many there are in all
let kept = null;       // the daemon's history of a session: {what, answer}
let keepsNone = null;  // when it last said that it has none: {what, at}
let listTop = 0;       // how far the list of sessions was scrolled

// The device that is shown. An address may name one that is not there: only the first one surely is.
const device = () => (route().device < (state?.devices.length ?? 1) ? route().device : 0);
const alone = () => route().session !== null;
const isEnding = () => ['draining', 'stopping'].includes(state.state);

async function ask(path) {
  const response = await fetch(path, {signal: AbortSignal.timeout(PATIENCE_MS)});
  if (!response.ok) throw new Error(`${path}: ${response.status} ${(await response.text()).trim()}`);
  return response.json();
}

// Asks every `period` ms, one question at a time, and while nobody looks every `unseen` ms.
function every(period, question, unseen = Infinity) {
  let asked = -Infinity;
  const next = async () => {
    const started = performance.now();
    if (!document.hidden || started - asked >= unseen) {
      asked = started;
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

// What the map and the table show of the sessions, and why there may be nothing.
function showList(matching) {
  const {search} = route();
  const none = search !== '' && state.sessions.length > 0 ? `No session matches “${search}”.` : null;
  showSearch(matching.length, state.sessions.length);
  const order =
    showSessions(byId('sessions'), byId('sessions-note'), byId('sessions-empty'), matching, state, device());
  setText(byId('sessions-empty'), none ?? (isEnding() ?
    'The daemon has closed all sessions. What their programs still hold is “left behind”.' :
    'No session is open. “vramctl hold 1GiB” opens one.'));
  showInMap(order, search !== '', none ?? 'Segments appear here when programs allocate, each with its blocks.');
}

// What the daemon is asked a history of.
const timelineOf = () => `device=${device()}${alone() ? `&session=id:${route().session}` : ''}`;
const keptNow = () => (kept?.what === timelineOf() && kept.answer.time_ms.length > 0 ? kept.answer : null);

function show() {
  for (const element of document.querySelectorAll('[data-in]')) {
    element.hidden = (element.dataset.in === 'session') !== alone();
  }
  byId('all-sessions').href = href({session: null});
  if (!alone()) byId('scopes-panel').hidden = true;
  hideEmptyCards();
  if (state === null) return;
  assignColors(state.sessions);
  setText(byId('version'), state.daemon_version);
  byId('overview').dataset.cards = (alone() || state.devices.length === 1) && !byId('timeline-panel').hidden ?
    'one' : 'many';
  const {reserved_bytes: reserved, capacity_bytes: capacity} = state.devices[device()];
  document.title = `${percent(reserved / capacity)} reserved · vrambroker`;
  if (alone()) {
    const {session} = route();
    document.title = `${showSession(state, device())} · vrambroker`;
    setText(byId('all-sessions-count'), plural(state.sessions.length, 'session'));
    showInMap([session], true, `This session holds no memory of device ${device()}.`);
    showHistory(byId('timeline-title'), byId('timeline-note'), route(), device(), limitOf(device()), keptNow());
    showScopesOfSession();
  } else {
    showDevices(byId('devices'), state, device(), (ordinal) => keep({device: ordinal}));
    showList(state.sessions.filter((session) => matches(session, route().search)));
  }
}

// A session that has ended holds nothing. Cards that have nothing of it either would be empty.
function hideEmptyCards() {
  const {run, session} = route();
  const gone = alone() && state !== null && shownAmong(state.sessions) === undefined;
  byId('map-panel').hidden = gone;
  byId('timeline-panel').hidden = gone && (keptNow() ?? historyOf(run, session, device())).time_ms.length === 0;
  byId('ooms-panel').hidden = gone && (!oomsShown.startsWith(`${session} `) || byId('ooms').childElementCount === 0);
}

function showScopesOfSession() {
  const isKnown = alone() && isOfThisRun() && map !== null && map.device === device();
  const scopes = isKnown ? scopesIn(map, route().session) : null;
  showScopes(byId('scopes-panel'), byId('scopes-box'), byId('scopes-note'), scopes);
}

// The address has changed, from what `before` says.
function onRoute(before) {
  const {session} = route();
  if (before.session === null && session !== null) listTop = scrollY;
  show();
  if (before.device !== route().device) askMap().catch(() => {});
  if (before.device !== route().device || before.session !== session) {
    askTimeline().catch(() => {});
    askOoms().catch(() => {});
  }
  if (before.session === session) return;
  if (session !== null) {
    scrollTo(0, 0);
    byId('session-title').focus({preventScroll: true});
  } else {
    scrollTo(0, listTop);
    document.querySelector(`#sessions tr[data-session="${before.session}"] a`)?.focus({preventScroll: true});
  }
}

async function askState() {
  const answer = await ask('/api/v1/state');
  const isNewRun = state?.run_id !== answer.run_id;
  state = answer;
  if (isNewRun) {  // drops what is known of an earlier run
    setRun(state.run_id);
    [map, kept, keepsNone, oomsShown] = [null, null, null, ''];
  }
  received = performance.now();
  receivedAt = new Date();
  remember(state.run_id, state.sessions, wasHidden ? UNSEEN_GAP_MS : GAP_MS);
  wasHidden = document.hidden;
  if (document.hidden) return;
  show();
  if (isNewRun) askMap().catch(() => {});
  await askOoms();
}

async function askOoms() {
  const {session} = route();
  const wanted = `${session} ${state?.run_id} ${state?.total_ooms}`;
  if (state === null || wanted === oomsShown || (alone() && !isOfThisRun())) return;
  const answer = await ask(session === null ? '/api/v1/ooms' : `/api/v1/ooms?session=id:${session}`);
  if (session !== route().session || answer.run_id !== state.run_id) return;
  oomsShown = `${session} ${answer.run_id} ${answer.total_events}`;
  showOoms(byId('ooms'), byId('ooms-note'), byId('ooms-empty'), answer, session !== null);
  hideEmptyCards();
}

async function askMap() {
  const wanted = device();
  const answer = await ask(`/api/v1/map?device=${wanted}`);
  if (wanted !== device() || answer.run_id !== state?.run_id) return;
  map = answer;
  showMap(map);
  showScopesOfSession();
}

async function askTimeline() {
  const what = timelineOf();
  if (alone() && !isOfThisRun()) return;
  if (keepsNone?.what === what && performance.now() - keepsNone.at < RETRY_MS) return;
  let answer = null;
  try {
    answer = await ask(`/api/v1/timeline?${what}`);
  } catch (error) {
    if (!what.includes('session')) throw error;
    keepsNone = {what, at: performance.now()};  // what this page has seen is shown
  }
  if (answer === null || what !== timelineOf() || answer.run_id !== state?.run_id) return;
  if (alone()) {
    kept = {what, answer};
    show();
  } else {
    showTimeline(byId('timeline-title'), byId('timeline-note'), answer);
  }
}

// Says how old the figures are.
function showAge() {
  const status = byId('status');
  const alert = byId('alert');
  const age = state === null ? performance.now() : performance.now() - received;
  const old = age > STALE_MS && !document.hidden;
  const lost = old && (age > LOST_MS || state === null);
  byId('main').className = old ? 'stale' : '';
  const kind = old ? (lost ? 'lost' : 'stale') : state === null ? 'waiting' : state.state;
  status.dataset.state = kind;
  setText(status, {serving: 'live', waiting: 'connecting', stale: 'slow', lost: 'no answer'}[kind] ?? kind);
  let text = '';
  if (lost) {
    text = state === null ? 'The daemon does not answer.' :
      `The daemon does not answer. What you see is from ${clock(receivedAt)}, ${duration(age)} ago.`;
    if (why !== '') text += ` (${why})`;
  } else if (state !== null && isEnding()) {
    text = state.state === 'draining' ?
      'The daemon is told to stop: it waits for the sessions to end, and opens no new ones.' :
      'The daemon stops. Programs keep what they hold.';
    if (state.health !== 'stopping') text += ` (${state.health})`;
  } else if (state !== null && state.health !== 'ok') {
    text = `The daemon says: ${state.health}`;
  }
  // The seconds that go by are not news to screen readers.
  alert.setAttribute('aria-live', lost ? 'off' : 'assertive');
  alert.hidden = text === '';
  setText(alert, text);
}

startTheme(byId('theme'));
startSearch();
startMap((session) => {
  if (session !== route().session) go({session});
});
startSessions(byId('sessions'), byId('sort'));
startTips();
watchMore(byId('sessions-box'), byId('sessions-more'), 'Rows', () => [...byId('sessions').tBodies[0].rows]);
watchMore(byId('ooms-box'), byId('ooms-more'), 'Refusals', () => [...byId('ooms').children]);
startTimeline(byId('timeline'));
onThemeChange(show);
startRoute(onRoute);
// Links to a part of the page leave the address, which says what is shown.
for (const link of document.querySelectorAll('a[data-jump]')) {
  link.addEventListener('click', (event) => {
    event.preventDefault();
    const title = document.querySelector(link.getAttribute('href'));
    title.closest('section, main').scrollIntoView();
    title.focus({preventScroll: true});
  });
}
document.addEventListener('visibilitychange', () => {
  wasHidden = true;
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && alone()) go({session: null});
});
show();
every(STATE_MS, askState, UNSEEN_MS);
every(MAP_MS, askMap);
every(TIMELINE_MS, askTimeline);
setInterval(showAge, 250);
