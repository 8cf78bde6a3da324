// SPDX-License-Identifier: Apache-2.0
// The box that says which sessions the map and the table show.
import {byId, setText} from './dom.js';
import {keep, route} from './route.js';

// What is written below a session's name.
export function detailsOf(session) {
  const parts = [`id ${session.id}`, `pid ${session.pid}`];
  if (session.tenant !== `uid:${session.uid}`) parts.push(`uid ${session.uid}`);
  if (session.placement === 'counted') parts.push('counted');  // its program has its memory of the driver itself
  if (session.tenant !== `claim:${session.claim}`) parts.push(session.tenant);  // a claim's own tenant says nothing more
  if (session.claim !== '') parts.push(`claim ${session.claim}`);
  return parts.join(' · ');
}

// Whether each word of `search` is in the session's name or details.
export function matches(session, search) {
  const text = `${session.name} ${detailsOf(session)}`.toLowerCase();
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
  byId('search-count').title = search === '' ? '' : `${matching} of ${all} sessions match`;
}
