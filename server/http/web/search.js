// SPDX-License-Identifier: Apache-2.0
// The box that says which sessions the map and the table show.
import {byId, setText} from './dom.js';
import {keep, route} from './route.js';

// What is written below a session's name: whose it is and what runs in it, as far as the daemon knows.
export function detailsOf(session) {
  const parts = [`pid ${session.pid}`, session.user || `uid:${session.uid}`];
  if (session.command) parts.push(session.command);
  // A user's own tenant says nothing more, and a claim's neither.
  if (![`uid:${session.uid}`, `claim:${session.claim}`].includes(session.tenant)) parts.push(session.tenant);
  if (session.placement === 'counted') parts.push('counted');  // its program has its memory of the driver itself
  if (session.claim !== '') parts.push(`claim ${session.claim}`);
  return parts.join(' · ');
}

// The same, and by what commands find it.
export const factsOf = (session) =>
  `id ${session.id} · ${detailsOf(session)}${session.user ? ` · uid:${session.uid}` : ''}`;

// Whether each word of `search` is in the session's name or facts.
export function matches(session, search) {
  const text = `${session.name} ${factsOf(session)} uid ${session.uid}`.toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function clear() {
  keep({search: ''});
  byId('search').focus();
}

export function startSearch() {
  const box = byId('search');
  box.addEventListener('input', () => keep({search: box.value}));
  box.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    event.preventDefault();
    event.stopPropagation();
    clear();
  });
  byId('search-clear').addEventListener('click', clear);
  document.addEventListener('keydown', (event) => {
    const writes = event.target.closest?.('input, textarea') ?? null;
    if (event.key !== '/' || event.ctrlKey || event.metaKey || event.altKey || writes !== null) return;
    if (byId('search-box').hidden) return;
    event.preventDefault();
    box.select();
    box.focus();
  });
}

export function showSearch(matching, all) {
  const {search} = route();
  const box = byId('search');
  if (box.value !== search) box.value = search;
  byId('search-clear').hidden = search === '';
  setText(byId('search-count'), search === '' ? '' : `${matching} of ${all}`);
}
