// SPDX-License-Identifier: Apache-2.0
// The last requests that got no memory, why, and what to do.
import {el, keyed, setText} from './dom.js';
import {bytes, moment, plural} from './format.js';
import {scopeTable, showUses} from './scopes.js';

const CAUSES = {
  LIMIT: 'over its limit',
  CAPACITY: 'device full',
  FRAGMENTATION: 'fragmentation',
  LARGER_THAN_DEVICE: 'larger than the device',
};

// Of a program that names the parts of its work.
const inScope = (scope) => (scope ? ` in scope ${scope}` : '');

function pinned(segment) {
  const [longest, ...others] = segment.longest_held;
  const scopes = new Set(others.map(({scope}) => scope).filter((scope) => scope && scope !== longest.scope));
  return `segment ${segment.address.toString(16)}: ${bytes(segment.hole_bytes)} of ${bytes(segment.segment_bytes)} fragmented, ` +
    plural(segment.pinning_blocks, 'block') + ' in use' +
    (longest === undefined ? '' :
      `, one of ${bytes(longest.block_bytes)}${inScope(longest.scope)} held for ${longest.held_seconds} s`) +
    (scopes.size === 0 ? '' : `; also of ${[...scopes].join(', ')}`);
}

// The scopes that hold or pin most of the session's memory, and the request's among them.
function scopesOf(oom) {
  if (oom.scopes.every(({scope}) => scope === '')) return null;
  const table = scopeTable({'aria-label': 'The largest scopes of the session then'});
  showUses(table, oom.scopes, oom.scope);
  return el('div', {class: 'scopes'}, table);
}

// `answer`: of /api/v1/ooms, of all sessions or of one.
export function showOoms(list, note, empty, answer, ofOne) {
  const all = answer.matching_events;
  empty.hidden = answer.events.length > 0;
  setText(empty, ofOne ? 'None of this session.' : 'None since the daemon was started.');
  setText(note, all === 0 ? '' : ofOne ? `${plural(all, 'request')} of this session` :
    `${plural(answer.total_events, 'request')} since the start`);
  // Numbers begin anew with each run of the daemon.
  keyed(list, answer.events, (event) => `${answer.run_id} ${event.refusal}`, (event) => {
    const oom = event.out_of_memory;
    const time = new Date(event.time);
    const elsewhere = oom.idle_elsewhere_bytes;
    const others = elsewhere > 0 ? `; ${bytes(elsewhere)} unused in other sessions` : '';
    const waited = oom.waited_ms > 0 ? `; waited ${(oom.waited_ms / 1000).toFixed(1)} s` : '';
    return el('li', {},
      el('div', {class: 'what'},
        el('b', {}, event.client),
        el('span', {class: `badge ${oom.cause === 'FRAGMENTATION' ? 'bad' : 'warn'}`}, CAUSES[oom.cause] ?? oom.cause),
        el('span', {}, `asked for ${bytes(oom.requested_bytes)} on device ${oom.device}${inScope(oom.scope)}` +
          (oom.claim === '' ? '' : ` in claim ${oom.claim}`)),
        el('time', {datetime: event.time}, moment(time))),
      oom.explanation === '' ? null : el('p', {class: 'why'}, oom.explanation),
      scopesOf(oom),
      ...(oom.cause === 'FRAGMENTATION' ? oom.pinned_segments : []).map((segment) => el('p', {class: 'why'}, pinned(segment))),
      el('p', {class: 'why'},
        `limit ${bytes(oom.limit_bytes)}, reserved ${bytes(oom.reserved_bytes)}, allocated ` +
        `${bytes(oom.allocated_bytes)}, largest free block ${bytes(oom.largest_free_block_bytes)}; ` +
        `${bytes(oom.device_available_bytes)} of the device free or cached${others}${waited}`),
      oom.advice === '' ? null : el('p', {class: 'advice'}, oom.advice));
  }, () => {});
}
