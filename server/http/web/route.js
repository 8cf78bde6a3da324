// SPDX-License-Identifier: Apache-2.0
// What the page shows, in its address after '#': so a reload, a bookmark and the back button keep it.

const DEFAULTS = {search: '', sort: '-reserved', session: null, run: '', device: 0, collapsed: ''};

let run = '';  // of the daemon; ids begin anew with each

function parse(text) {
  const given = new URLSearchParams(text);
  const number = (name) => (/^\d{1,15}$/.test(given.get(name) ?? '') ? Number(given.get(name)) : DEFAULTS[name]);
  const session = number('session');  // the id of the one that is shown alone
  return {
    search: given.get('search') ?? DEFAULTS.search,
    sort: given.get('sort') ?? DEFAULTS.sort,  // a column; '-' before it: the highest first
    session,
    run: session === null ? '' : given.get('run') ?? run,  // of the daemon that had the session
    device: number('device'),
    collapsed: given.get('collapsed') ?? DEFAULTS.collapsed,  // claims, with commas between
  };
}

let current = parse(location.hash.slice(1));
let changed = () => {};

export const route = () => current;

// The daemon has answered, perhaps another one than before.
export function setRun(now) {
  run = now;
  if (current.session !== null && current.run === '') current = {...current, run};
}

// Whether the session that is shown alone is one of this run: else another session may have its id.
export const isOfThisRun = () => current.run === run;

// Finds that session, while it is open.
export const shownAmong = (sessions) =>
  (isOfThisRun() ? sessions.find(({id}) => id === current.session) : undefined);

// The address of the same with `changes`, for a link.
export function href(changes) {
  const wanted = {...current, ...changes};
  if ('session' in changes) wanted.run = changes.session === null ? '' : run;
  const different = Object.entries(wanted).filter(([name, value]) => value !== DEFAULTS[name]);
  return `#${new URLSearchParams(different)}`;
}

// Goes there; the back button comes back.
export function go(changes) {
  location.hash = href(changes);
}

// Changes the address of where the reader is: there is nothing to come back to.
export function keep(changes) {
  history.replaceState(history.state, '', href(changes));
  update();
}

function update() {
  const before = current;
  current = parse(location.hash.slice(1));
  changed(before);
}

// Calls `then` with what was shown before.
export function startRoute(then) {
  changed = then;
  addEventListener('hashchange', update);
}
