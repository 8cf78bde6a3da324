// SPDX-License-Identifier: Apache-2.0
// Claims in the table of sessions: a row for each, which its sessions follow. A claim can be collapsed: its sessions are
// not shown then. The address says which are.
import {plural} from './format.js';
import {keep, route} from './route.js';

const collapsed = () => new Set(route().collapsed.split(',').filter((name) => name !== ''));

export function toggle(claim) {
  const names = collapsed();
  if (!names.delete(claim.name)) names.add(claim.name);
  keep({collapsed: [...names].sort().join(',')});
}

function ownerOf(claim) {
  if (claim.rule !== '') return `rule ${claim.rule}`;
  return claim.owner_uid === null ? 'for everyone' : `uid ${claim.owner_uid}`;
}

// What a session holds of a device, or the sessions of a claim.
export const heldBySessions = (held) => held.held_bytes ?? held.reserved_bytes;

// What a claim has, under the keys of a session: a row of the same columns.
function asSession(claim, sessions) {
  const sum = (device, of) => sessions.reduce((total, session) => total + of(session.devices[device]), 0);
  const devices = claim.devices.map((held, device) => ({
    ...held,
    over_limit: held.reserved_bytes > held.limit_bytes,
    inactive_split_bytes: sum(device, (of) => of.inactive_split_bytes),
    held_bytes: sum(device, heldBySessions),
    num_ooms: held.refusals,
    waiting: sessions.flatMap((session) => session.devices[device].waiting).sort((a, b) => a.place - b.place),
  }));
  const idle = sessions.map((session) => session.idle_ms ?? null).filter((ms) => ms !== null);
  const [started] = sessions.map((session) => session.started).sort();
  return {id: 0, name: claim.name, state: claim.state, devices, started, idle_ms: idle.length > 0 ? Math.min(...idle) : null,
    details: `claim · ${plural(claim.sessions, 'session')} · ${ownerOf(claim)}`};
}

// Whether there is anything to see of it on the device.
function isUsed(claim, device, sessions) {
  return sessions.length > 0 || claim.devices[device].reserved_bytes > 0 || claim.devices[device].guarantee_bytes > 0;
}

// {claim's name: sessions}.
function byClaim(sessions) {
  const groups = new Map();
  for (const session of sessions) {
    if (!groups.has(session.claim)) groups.set(session.claim, []);
    groups.get(session.claim).push(session);
  }
  return groups;
}

// `matching`: those of `sessions` that the search finds. Returns the rows in the order of `compare`, those of claims with
// `claim` and their sessions after them: {key, session, claim?, isCollapsed?, isInClaim?}; and the ids of all sessions that
// are found, in the same order.
export function rowsOf(matching, {sessions, claims}, search, device, compare) {
  const rows = [];
  const grouped = new Set();
  const hidden = collapsed();
  const [all, found] = [byClaim(sessions), byClaim(matching)];
  const lower = search.toLowerCase();
  for (const claim of claims) {
    const [its, shown] = [all.get(claim.name) ?? [], found.get(claim.name) ?? []];
    if (shown.length === 0 && !claim.name.toLowerCase().includes(lower)) continue;
    if (!isUsed(claim, device, its)) continue;
    grouped.add(claim.name);
    const isCollapsed = hidden.has(claim.name);
    rows.push({key: `claim ${claim.name}`, session: asSession(claim, its), claim, isCollapsed, its: shown.sort(compare)});
  }
  for (const session of matching) {
    if (!grouped.has(session.claim)) rows.push({key: String(session.id), session});
  }
  rows.sort((a, b) => compare(a.session, b.session));
  return {
    rows: rows.flatMap((row) => [row, ...(row.claim === undefined || row.isCollapsed ? [] :
      row.its.map((session) => ({key: String(session.id), session, isInClaim: true})))]),
    order: rows.flatMap(({session, its = [session]}) => its.map(({id}) => id)),
  };
}
