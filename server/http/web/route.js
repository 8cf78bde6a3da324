// SPDX-License-Identifier: Apache-2.0
// What the page shows, in its address after '#': so a reload, a bookmark and the back button keep it.

const DEFAULTS = {search: '', sort: '-reserved', session: null, device: 0, collapsed: ''};

function parse(text) {
  const given = new URLSearchParams(text);
  const number = (name) => (/^\d{1,15}$/.test(given.get(name) ?? '') ? Number(given.get(name)) : DEFAULTS[name]);
  return {
    search: given.get('search') ?? DEFAULTS.search,
    sort: given.get('sort') ?? DEFAULTS.sort,  // a column; '-' before it: the highest first
    session: number('session'),                // the id of the one that is shown alone
    device: number('device'),
    collapsed: given.get('collapsed') ?? DEFAULTS.collapsed,  // claims, with commas between
  };
}

let current = parse(location.hash.slice(1));
let changed = () => {};

export const route = () => current;

// The address of the same with `changes`, for a link.
export function href(changes) {
  const wanted = {...current, ...changes};
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
