// SPDX-License-Identifier: Apache-2.0
//
// Tests the daemon's web page in Chromium, on a real daemon with real clients. The page shows vramctl's figures and has
// no faults. The test keeps pictures of the page.
// Usage: page_test.mjs BUILD_DIR [--pictures DIR]   (run by run.sh)
import assert from 'node:assert/strict';
import {Daemon, waitFor} from './daemon.mjs';
import {bytes, percent} from './format.mjs';
import {DESKTOP, PHONE, Page, build, expectAccessible, withBrowser} from './page.mjs';

const MIB = 2 ** 20;

// ---- The page and vramctl ----

const shareOf = (fragmented, held) => (held === 0 ? 0 : fragmented / held);

// Returns the rows that the page must show for vramctl's sessions.
function expectedRows(sessions) {
  return sessions.map((session) => {
    const device = session.devices[0];
    return {
      name: session.name,
      details: [`pid ${session.pid}`, session.user || session.tenant, ...(session.command ? [session.command] : [])].join(' · '),
      reserved: bytes(device.reserved_bytes),
      limit: `of ${bytes(device.limit_bytes)}`,
      cells: [bytes(device.allocated_bytes), bytes(device.idle_bytes), bytes(device.inactive_split_bytes),
        percent(shareOf(device.inactive_split_bytes, device.reserved_bytes)),
        device.guarantee_bytes === 0 ? '–' : bytes(device.guarantee_bytes), '–',
        String(device.num_ooms), session.state],
    };
  }).sort((a, b) => a.name.localeCompare(b.name));
}

// Clients report once a second, and at once when vramctl asks about a single session.
async function allReport(daemon) {
  for (const {id} of (await daemon.vramctlJson('sessions')).sessions) await daemon.vramctl('summary', String(id));
}

// Returns vramctl's figures of the device, the sessions and the number of blocks.
async function vramctlFigures(daemon) {
  await allReport(daemon);
  const {devices: [device]} = await daemon.vramctlJson('status');
  const {sessions} = await daemon.vramctlJson('sessions');
  let blocks = 0;
  for (const session of sessions) {
    const {segments} = JSON.parse(await daemon.vramctl('snapshot', String(session.id), '-o', '-'));
    blocks += segments.reduce((sum, segment) => sum + segment.blocks.length, 0);
  }
  return {device, sessions, blocks};
}

const FIGURES = ['free', 'capacity', 'reserved', 'allocated', 'fragmented', 'reclaimable', 'cached', 'fragmented_share'];
const nonZero = (sizes) => Object.fromEntries(Object.entries(sizes).filter(([, size]) => size > 0)
  .map(([name, size]) => [name, bytes(size)]));
// Sorts the keys, so that two objects compare as text.
const inOrder = (figures) => Object.fromEntries(FIGURES.filter((name) => name in figures).map((name) => [name, figures[name]]));

// Waits until the page shows vramctl's figures, to the last digit. No figure may change during the wait.
async function expectPageIsVramctl(page, daemon) {
  let [seen, wanted, said] = [];
  try {
    await waitFor('the page', async () => {
      said = await vramctlFigures(daemon);
      const {device, sessions, blocks} = said;
      wanted = {
        figures: {
          free: bytes(device.free_bytes), capacity: bytes(device.capacity_bytes), reserved: bytes(device.reserved_bytes),
          ...nonZero({allocated: device.allocated_bytes, fragmented: device.inactive_split_bytes,
            reclaimable: device.reclaimable_bytes, cached: device.idle_bytes}),
          ...(device.inactive_split_bytes === 0 ? {} :
            {fragmented_share: percent(shareOf(device.inactive_split_bytes, device.leased_bytes))}),
        },
        rows: expectedRows(sessions),
        blocks: String(blocks),
      };
      const figures = await page.figures();
      assert.equal(Object.keys(figures)[0], 'free');
      wanted.figures = inOrder(wanted.figures);
      seen = {
        figures: inOrder(figures),
        rows: (await page.rows()).map((row) => ({...row, cells: row.cells.slice(0, -2)})).sort((a, b) => a.name.localeCompare(b.name)),
        blocks: await page.tab.locator('#map').getAttribute('data-blocks'),
      };
      return JSON.stringify(seen) === JSON.stringify(wanted);
    });
  } catch (error) {
    assert.deepEqual(seen, wanted);
    throw error;
  }
  return said;
}

// Expects each of vramctl's keys and values in the API's JSON, which may have more keys.
function expectContains(actual, expected, where) {
  if (where.endsWith('.idle_ms')) return;  // grows from question to question
  if (typeof expected !== 'object' || expected === null) {
    assert.equal(actual, expected, where);
    return;
  }
  for (const [key, value] of Object.entries(expected)) expectContains(actual?.[key], value, `${where}.${key}`);
}

// ---- The tests, on one daemon ----

async function idle(browser, daemon) {
  const page = await Page.open(browser, daemon.url);
  await page.tab.waitForSelector('#sessions-empty:visible');
  await page.tab.waitForSelector('#ooms-empty:visible');
  await waitFor('a timeline', async () => (await page.text('#timeline-note')) !== '');
  await expectPageIsVramctl(page, daemon);
  await page.picture('idle');
  await page.close();
}

// Starts clients that hold memory of many sizes, with holes.
async function work(daemon) {
  const clients = {};
  // The seed is fixed: each run allocates equal sizes.
  let seed = 20261;
  const random = (n) => {
    seed = (seed + 0x6D2B79F5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) % n;
  };
  for (const [name, limit, count, most] of [['trainer', 3072, 60, 96], ['finetune', 2048, 44, 64],
    ['notebook', 1024, 26, 30], ['serving/chat', 1536, 30, 72]]) {
    const client = clients[name] = await daemon.client(name, String(limit * MIB));
    const allocated = [];
    for (let i = 0; i < count; ++i) {
      const [status, index] = await client.ask(`alloc ${Math.floor(MIB * (random(3) === 0 ? 0.2 : 1 + random(most)))}`);
      if (status === 'ok') allocated.push(index);
    }
    await client.callAll(allocated.filter((_, i) => i % 3 === 1).map((index) => `free ${index}`));
  }
  return clients;
}

async function busy(browser, daemon) {
  const page = await Page.open(browser, daemon.url);
  const clients = await work(daemon);
  const remote = await daemon.client('remote', String(256 * MIB), 'remote');  // the daemon tells this client's blocks
  await remote.callAll(['alloc 1000', 'alloc 3000000', 'alloc 18874368']);
  const {device, sessions} = await expectPageIsVramctl(page, daemon);

  const state = await daemon.json('/api/v1/state');
  expectContains(state.sessions, sessions, 'state.sessions');
  expectContains(state.devices[0], device, 'state.devices');
  expectContains((await daemon.json('/api/v1/sessions')).sessions, sessions, 'sessions');
  for (const session of sessions) {
    const file = JSON.parse(await daemon.vramctl('snapshot', session.name, '-o', '-'));
    file.device_traces = file.device_traces.map(() => []);  // recordings are not for everyone who can connect
    assert.deepEqual(await daemon.json(`/snapshot.json?session=${encodeURIComponent(session.name)}`), file);
  }
  assert.equal(await daemon.metric('vrambroker_device_reserved_bytes{gpu="0"}'), device.reserved_bytes);
  const timeline = await waitFor('the timeline', async () => {
    const answer = await daemon.json('/api/v1/timeline');
    return answer.allocated_bytes.at(-1) === device.allocated_bytes && answer.time_ms.length > 2 ? answer : null;
  });
  assert.equal(timeline.leased_bytes.at(-1) + timeline.idle_bytes.at(-1), device.reserved_bytes);

  await page.showsNowInTimeline(daemon);
  await page.picture('busy');
  await expectUsable(page);
  assert.ok(Object.values(await page.figures()).every((text) => !/^0( B)?$/.test(text)), 'figures of nothing are left out');
  await page.close();
  for (const [name, options] of [['busy-dark', {colorScheme: 'dark'}], ['phone', {viewport: PHONE}],
    ['phone-dark', {viewport: PHONE, colorScheme: 'dark'}]]) {
    const other = await Page.open(browser, daemon.url, options);
    await other.tab.waitForSelector('#map[data-draw-ms]');
    await waitFor('a chart', async () => (await other.text('#timeline-note')) !== '');
    const wide = await other.tab.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(wide <= (options.viewport ?? DESKTOP).width, `${name}: ${wide} pixels wide`);
    if (options.colorScheme === 'dark') await expectAccessible(other, name);
    await other.picture(name);
    await other.close();
  }
  return {clients};
}

// Sorts the table, opens a single session, moves in the map by keys and mouse, and changes the theme.
async function expectUsable(page) {
  const {tab} = page;
  await tab.getByRole('button', {name: 'Session', exact: true}).click();
  let names = (await page.rows()).map((row) => row.name);
  assert.deepEqual(names, [...names].sort((a, b) => a.localeCompare(b)));
  assert.equal(await tab.locator('th[aria-sort=ascending]').innerText(), 'Session ↑');
  await tab.getByRole('button', {name: 'Session ↑'}).click();
  names = (await page.rows()).map((row) => row.name);
  assert.deepEqual(names, [...names].sort((a, b) => b.localeCompare(a)));

  await tab.getByRole('link', {name: 'notebook', exact: true}).click();
  await waitFor('its view', async () => (await page.text('#session-title')) === 'notebook');
  await tab.keyboard.press('Escape');
  await tab.waitForSelector('#session-title', {state: 'hidden'});

  await tab.locator('#map').focus();
  await tab.keyboard.press('ArrowRight');
  const first = await tab.locator('#map-spoken').textContent();
  assert.match(first, /^trainer; .* segment \d+ of /);
  await tab.keyboard.press('ArrowRight');
  assert.notEqual(await tab.locator('#map-spoken').textContent(), first);
  await tab.keyboard.press('Enter');
  await waitFor('its view', async () => (await page.text('#session-title')) === 'trainer');
  await tab.goBack();
  await tab.waitForSelector('#sessions:visible');

  const box = await tab.locator('#map').boundingBox();
  await tab.mouse.move(box.x + 180, box.y + 12);
  assert.match(await page.text('#map-tip'), /^trainer\n/);
  await tab.mouse.move(5, 5);

  const ground = () => tab.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await tab.locator('#theme').click();
  assert.equal(await ground(), light);  // auto -> light: auto was light, too
  await tab.locator('#theme').click();
  assert.notEqual(await ground(), light);
  await tab.locator('#theme').click();
}

// A silent client's segments have no blocks in the map. All other clients' segments keep their blocks.
async function silent(browser, daemon, {clients}) {
  const page = await Page.open(browser, daemon.url);
  const {process} = clients.notebook;
  process.kill('SIGSTOP');
  await waitFor('no answer', async () => (await page.text('#map-note')).includes('no answer from notebook'));
  const map = await daemon.json('/api/v1/map?device=0');
  assert.deepEqual(map.sessions.filter((session) => session.answer !== 'blocks').map((session) => session.name),
    ['notebook']);
  const of = (name) => map.segments.filter((segment) => segment.session_id ===
    map.sessions.find((session) => session.name === name).id);
  assert.ok(of('notebook').length > 0 && of('notebook').every((segment) => segment.blocks === undefined));
  assert.ok(of('trainer').every((segment) => segment.blocks.length > 0));
  await page.picture('no-answer');
  process.kill('SIGCONT');
  await waitFor('an answer', async () => !(await page.text('#map-note')).includes('no answer'));
  await page.close();
}

// The page says that the daemon does not answer, and from when the figures are.
async function lost(browser, daemon) {
  const page = await Page.open(browser, daemon.url);
  daemon.process.kill('SIGSTOP');
  await page.tab.waitForSelector('#alert:visible');
  assert.match(await page.text('#alert'), /^The daemon does not answer\. What you see is from \d\d:\d\d:\d\d/);
  assert.equal(await page.text('#status'), 'no answer');
  await page.picture('no-daemon');
  daemon.process.kill('SIGCONT');
  await page.tab.waitForSelector('#status[data-state=serving]');
  await page.tab.waitForSelector('#alert', {state: 'hidden'});
  await page.context.close();  // Page.close() would fail: the browser itself logs the failed requests
}

async function refused(browser, daemon, {clients}) {
  const page = await Page.open(browser, daemon.url);
  const batch = await daemon.client('batch', '-', 'wait_ms=600000');
  batch.ask(`alloc ${7000 * MIB}`).catch(() => {});  // the answer never comes
  await waitFor('the one that waits', async () => (await page.rows()).some((row) => row.name === 'batch' &&
    /^6\.8[0-9] GiB for [0-9.]+ s \(place 1\)$/.test(row.cells[5])));
  assert.equal((await page.figures()).waiting, '1');
  await page.showsNowInTimeline(daemon);
  await page.tab.locator('tr', {hasText: 'batch'}).scrollIntoViewIfNeeded();
  await page.picture('waiting');
  batch.process.kill('SIGKILL');
  const [status] = await clients.trainer.ask(`alloc ${3000 * MIB}`);
  assert.equal(status, 'error');
  assert.equal((await clients['serving/chat'].ask(`alloc ${20000 * MIB}`))[0], 'error');
  const ooms = await daemon.vramctlJson('ooms');
  expectContains(await daemon.json('/api/v1/ooms'), ooms, 'ooms');
  await waitFor('the refusals', async () => await page.tab.locator('#ooms li').count() === ooms.events.length);
  for (const [i, event] of ooms.events.entries()) {
    const text = await page.tab.locator('#ooms li').nth(i).innerText();
    const oom = event.out_of_memory;
    for (const part of [event.client, `asked for ${bytes(oom.requested_bytes)}`, `limit ${bytes(oom.limit_bytes)}`,
      `reserved ${bytes(oom.reserved_bytes)}`, oom.advice]) {
      assert.ok(text.includes(part), `${part} is not in: ${text}`);
    }
  }
  await waitFor('their number', async () => (await page.figures()).refused === String(ooms.total_events));
  await page.tab.locator('#ooms').scrollIntoViewIfNeeded();
  await page.picture('refused');
  await page.close();
}

// Runs deploy/demo/fragmentation.cc step by step: page, vramctl, /metrics and /snapshot.json agree at each step.
async function fragmentation(browser, daemon) {
  const page = await Page.open(browser, daemon.url);
  const {process, lines} = daemon.program('deploy/vrambroker-fragmentation', ['--pause']);
  const untilStep = async () => {
    for (;;) {
      const line = await lines.next();
      if (line.includes(' reserved ')) return line;
    }
  };
  for (const step of ['100 x 4 MB', '100 MB more', 'emptied', '30 of 10 to 200 MB', '500 MB more', 'emptied again']) {
    const line = await untilStep();
    const said = /reserved +([0-9.]+ \w+) +allocated +([0-9.]+ \w+) +fragmentation +([0-9.]+%)/.exec(line).slice(1);
    const {device, sessions, blocks} = await expectPageIsVramctl(page, daemon);
    const [session] = sessions;
    const here = session.devices[0];
    assert.deepEqual([bytes(here.reserved_bytes), bytes(here.allocated_bytes), percent(here.fragmentation_ratio)], said,
      step);
    // The table of vramctl summary shows the session's sizes.
    const summary = await daemon.vramctl('summary', session.name);
    const row = (title) => summary.split('\n').find((each) => each.includes(title)).replaceAll(/\s+/g, ' ');
    for (const [title, value] of [['GPU reserved memory', here.reserved_bytes], ['Allocated memory', here.allocated_bytes]]) {
      const [, number, unit] = /\| *(\d+) (\w+) \|/.exec(row(title));  // vramctl cuts the number, and does not round
      assert.equal(Number(number), Math.floor(value / 1024 ** ['B', 'KiB', 'MiB', 'GiB'].indexOf(unit)), row(title));
    }
    // /metrics
    const labels = `{client="${session.name}",gpu="0"`;
    const metrics = await (await daemon.get('/metrics')).text();
    for (const [name, value] of [['reserved_bytes', here.reserved_bytes], ['allocated_bytes', here.allocated_bytes],
      ['fragmentation_ratio', here.fragmentation_ratio]]) {
      const series = metrics.split('\n').find((each) => each.startsWith(`vrambroker_client_${name}${labels}`));
      const metric = Number(series.slice(series.lastIndexOf(' ') + 1));
      assert.ok(Math.abs(metric - value) <= 1e-12 * Math.max(1, value), `${step}: ${series}, not ${value}`);
    }
    assert.equal(await daemon.metric('vrambroker_device_reserved_bytes{gpu="0"}'), device.reserved_bytes);
    // /snapshot.json
    const snapshot = await daemon.json(`/snapshot.json?session=${session.name}`);
    const sum = (of) => snapshot.segments.reduce((total, segment) => total + of(segment), 0);
    assert.equal(sum((segment) => segment.total_size), here.reserved_bytes, step);
    assert.equal(sum((segment) => segment.allocated_size), here.allocated_bytes, step);
    assert.equal(sum((segment) => segment.blocks.length), blocks, step);
    console.log(`  ${step}: ${said.join(', ')}: page, vramctl, /metrics and /snapshot.json agree`);
    if (step === '500 MB more') await page.picture('fragmented');
    process.stdin.write('\n');
  }
  process.stdin.end();
  await page.close();
}

// The daemon refuses hostile session names, but the page must not rely on the daemon's refusal.
async function hostile(browser, daemon) {
  const names = ['<img src=x onerror=alert(1)>', '"><script>alert(2)</script>', "'; alert(3); '", '\u202egpj.exe',
    '&lt;b&gt;', `long${'x'.repeat(300)}`];
  const rename = async (route) => {
    const response = await route.fetch();
    const json = await response.json();
    json.sessions.forEach((session, i) => {
      session.name = names[i % names.length];
      session.tenant = names[0];
    });
    if (json.claims !== undefined) {
      json.sessions[0].claim = names[0];
      json.claims = [{name: names[0], state: names[0], rule: names[1], sessions: 1, refusals: 0,
        devices: [{limit_bytes: 1, guarantee_bytes: 1, reserved_bytes: 1, left_behind_bytes: 0, allocated_bytes: 1, idle_bytes: 0, refusals: 0}]}];
    }
    await route.fulfill({response, json});
  };
  const page = await Page.open(browser, daemon.url, {prepare: async (tab) => {
    await tab.route('**/api/v1/state', rename);
    await tab.route('**/api/v1/map*', rename);
    await tab.route('**/api/v1/ooms', async (route) => {
      const response = await route.fetch();
      const json = await response.json();
      for (const event of json.events) {
        event.client = names[0];
        event.out_of_memory.advice = names[1];
        event.out_of_memory.claim = names[0];
      }
      await route.fulfill({response, json});
    });
  }});
  await page.tab.waitForSelector('#ooms li');
  await waitFor('the rows', async () => (await page.rows()).length >= 6);  // five sessions and the claim's row
  const rows = await page.rows();
  assert.deepEqual(new Set(rows.map((row) => row.name)), new Set(names.slice(0, rows.length - 1)));
  assert.match(await page.text('#ooms li:first-child'), /<img src=x onerror=alert\(1\)>/);
  await page.tab.waitForSelector('#map[data-draw-ms]');
  await page.tab.locator('#map').focus();
  await page.tab.keyboard.press('ArrowRight');
  const tip = await page.text('#map-tip');
  const first = names.find((name) => tip.startsWith(name));
  assert.ok(first !== undefined, tip);
  assert.equal(await page.tab.evaluate(() => document.querySelectorAll('img, script:not([src])').length), 0);
  const wide = () => page.tab.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(await wide() <= DESKTOP.width, `${await wide()} pixels wide`);
  // A session's view opens by the number in the address. Text that is no number opens no view.
  await page.tab.keyboard.press('Enter');
  await waitFor('its view', async () => (await page.text('#session-title')) === first);
  await page.tab.locator('#all-sessions').click();
  await page.tab.locator('#sessions a', {hasText: 'longxxx'}).or(page.tab.locator('#sessions a').last()).first().click();
  await page.tab.waitForSelector('#session-title:visible');
  assert.ok(await wide() <= DESKTOP.width, `${await wide()} pixels wide`);
  await page.tab.evaluate(() => {
    location.hash = `#session=1<script>&search=${encodeURIComponent('<img src=x>')}&sort=<b>&device=-7`;
  });
  await waitFor('no match', async () => (await page.text('#sessions-empty')) === 'No session matches “<img src=x>”.');
  assert.equal(await page.tab.evaluate(() => document.querySelectorAll('img, script:not([src])').length), 0);
  await page.close();
}

// A claim's sessions follow the claim's row. The row's button hides the sessions, and the address keeps the choice.
async function claims(browser, daemon) {
  await daemon.vramctl('claim', 'create', 'team-a', '--limit=600MiB', '--guarantee=300MiB');
  await daemon.vramctl('claim', 'create', 'unused');
  const trainer = await daemon.clientAt(`${daemon.dir}/claims/team-a`, 'trainer');
  await trainer.call(`alloc ${200 * MIB}`);
  await (await daemon.clientAt(`${daemon.dir}/claims/team-a`, 'evaluator')).call(`alloc ${40 * MIB}`);
  await (await daemon.client('alone')).call(`alloc ${100 * MIB}`);
  const page = await Page.open(browser, daemon.url);
  const names = async () => (await page.rows()).map((row) => row.name).join(' ');
  await waitFor('the claim', async () => (await names()) === 'team-a trainer evaluator alone');
  await allReport(daemon);
  const {claims: [claim]} = await daemon.vramctlJson('claim', 'ls');
  expectContains((await daemon.json('/api/v1/state')).claims[0], claim, 'state.claims');
  const [row] = await page.rows();
  assert.equal(row.details, `claim · 2 sessions · uid ${process.getuid()}`);
  assert.deepEqual([row.reserved, row.limit, row.cells[4]], ['240.00 MiB', 'of 600.00 MiB', '300.00 MiB']);
  assert.equal(await page.text('#sessions-note'), '3 sessions · 2 claims');

  assert.equal((await trainer.ask(`alloc ${500 * MIB}`))[0], 'error');  // the device has enough, the claim does not
  await waitFor('the refusal', async () => (await page.tab.locator('#ooms li').innerText())
    .includes('on device 0 in claim team-a'));
  await waitFor('its count', async () => (await page.rows())[0].cells[6] === '1');
  await page.picture('claims');
  await expectAccessible(page, 'claims');

  await page.tab.locator('tr.claim button').click();
  await waitFor('one row', async () => (await names()) === 'team-a alone');
  assert.equal(await page.tab.locator('tr.claim button').getAttribute('aria-expanded'), 'false');
  await page.tab.reload();
  await waitFor('the same', async () => (await names()) === 'team-a alone');
  await page.tab.locator('#search').fill('evalu');
  await waitFor('its claim', async () => (await names()) === 'team-a');
  await page.tab.locator('tr.claim .usage').click();
  await waitFor('what is found', async () => (await names()) === 'team-a evaluator');
  await page.tab.locator('#search').fill('team-a');
  await waitFor('all of the claim', async () => (await names()) === 'team-a trainer evaluator');
  await page.tab.locator('#search-clear').click();
  await page.tab.getByRole('button', {name: 'Session', exact: true}).click();
  await waitFor('by name', async () => (await names()) === 'alone team-a evaluator trainer');
  await daemon.vramctl('claim', 'rm', 'team-a');
  await waitFor('its state', async () => (await page.rows())[1].cells[7] === 'draining');
  await page.close();
}

// Session ids begin anew with each run of the daemon: the page must not mix the figures of two runs. A claim's row
// shows the chosen device.
async function restarted(browser, daemon) {
  await daemon.vramctl('claim', 'create', 'team', '--limit=600MiB');
  const early = await daemon.clientAt(`${daemon.dir}/claims/team`, 'early', '-', 'remote');
  await early.call(`alloc ${3 * MIB}`);
  assert.equal((await early.ask(`alloc ${700 * MIB}`))[0], 'error');
  const page = await Page.open(browser, daemon.url);
  const refusalOf = async (row) => (await page.rows()).find(({name}) => name === row)?.cells[6];
  await waitFor('the refusal', async () => (await page.text('#ooms')).includes('early'));
  await waitFor('its count', async () => (await refusalOf('team')) === '1');
  await page.tab.locator('article[aria-label="Device 1"] .device-head button').click();
  await waitFor('the other device', async () => (await refusalOf('team')) === '0');
  await page.tab.locator('article[aria-label="Device 0"] .device-head button').click();
  await page.tab.getByRole('link', {name: 'early', exact: true}).click();
  await waitFor('its view', async () => (await page.text('#session-title')) === 'early');

  const {sessions: [{id}], run_id: before} = await daemon.json('/api/v1/state');
  early.process.kill('SIGKILL');
  await daemon.restart();
  const late = await daemon.clientAt(`${daemon.dir}/claims/team`, 'late', '-', 'remote');
  await late.call(`alloc ${3 * MIB}`);
  assert.equal((await late.ask(`alloc ${700 * MIB}`))[0], 'error');
  const {sessions: [session], total_ooms: refusals, run_id: now} = await daemon.json('/api/v1/state');
  assert.deepEqual([session.name, session.id, refusals], ['late', id, 1]);
  assert.notEqual(now, before);
  for (const path of ['sessions', 'ooms', 'map?device=0', 'timeline?device=0', `timeline?session=id:${id}`]) {
    assert.equal((await daemon.json(`/api/v1/${path}`)).run_id, now, path);
  }
  // The session that now has the early session's id is a different session.
  await page.tab.waitForSelector('#session-gone:visible');
  assert.equal(await page.text('#session-title'), 'early');
  await page.tab.reload();
  await page.tab.waitForSelector('#session-gone:visible');
  assert.equal(await page.text('#session-title'), `Session ${id}`);
  await page.tab.goBack();
  await waitFor('the refusals of now', async () => (await page.text('#ooms')).includes('late'));
  assert.ok(!(await page.text('#ooms')).includes('early'));
  await page.context.close();  // Page.close() would fail: the browser itself logs the failed requests

  // An open page asks anew after a restart, though the number of refusals is unchanged.
  const other = await Page.open(browser, daemon.url);
  await waitFor('the refusal', async () => (await other.text('#ooms')).includes('late'));
  late.process.kill('SIGKILL');
  await daemon.restart();
  const latest = await daemon.client('latest', '-', 'remote');
  assert.equal((await latest.ask(`alloc ${20000 * MIB}`))[0], 'error');
  await waitFor('the refusal of now', async () => (await other.text('#ooms')).includes('latest'));
  assert.equal(await other.tab.locator('#ooms li').count(), 1);
  await other.context.close();
}

// Returns the milliseconds of each of 40 draws of the map, and the milliseconds between frames.
function measureMap(page) {
  return page.tab.evaluate(async () => {
    const map = document.getElementById('map');
    const draws = [];
    const frames = [];
    let before = null;
    for (let i = 0; i < 40; ++i) {
      map.closest('.map-frame').dispatchEvent(new Event('scroll'));  // the map draws in the next frame
      const now = await new Promise((resolve) => requestAnimationFrame(() => resolve(performance.now())));
      draws.push(Number(map.dataset.drawMs));
      if (before !== null) frames.push(now - before);
      before = now;
    }
    return {draws, frames};
  });
}

// The map draws 10,000 blocks with holes, in a time that grows about linearly with the number of blocks.
async function large(browser, daemon) {
  const client = await daemon.client('large');
  const hold = async (from, to) => {
    const answers = await client.callAll(Array.from({length: to - from}, (_, i) => i + from)
      .map((i) => `alloc ${i % 5 === 0 ? 1_100_000 + i * 40 : (1 + i % 7) * 20000}`));
    await client.callAll(answers.filter((_, i) => i % 4 === 2).map(([index]) => `free ${index}`));
  };
  const page = await Page.open(browser, daemon.url);
  await hold(0, 2500);
  const {blocks: fewer} = await expectPageIsVramctl(page, daemon);
  const quarter = await measureMap(page);
  await hold(2500, 10500);  // some new blocks fill holes
  const {blocks} = await expectPageIsVramctl(page, daemon);
  assert.ok(blocks >= 10000, `${blocks} blocks`);
  const whole = await measureMap(page);
  const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const started = performance.now();
  const answer = await (await daemon.get('/api/v1/map')).text();
  console.log(`  ${blocks} blocks: drawn in ${median(whole.draws)} ms, a frame every ${median(whole.frames).toFixed(1)} ms; ` +
    `/api/map ${(answer.length / 1024).toFixed(0)} KiB in ${(performance.now() - started).toFixed(0)} ms`);
  // A slow machine is no fault. A time that grows with the square of the number of blocks is a fault: 16 times as much.
  // The fastest of many draws had the least delay from other work.
  const [few, many] = [Math.max(2, Math.min(...quarter.draws)), Math.min(...whole.draws)];
  assert.ok(many < 10 * few, `${blocks} blocks drawn in ${many} ms, ${fewer} in ${few} ms`);
  await page.showsNowInTimeline(daemon);
  await page.picture('large');
  await page.close();
  await client.goodbye();
}

// The page shows that the daemon stops, and never shows a session's memory as free.
async function stopping(browser, daemon) {
  const client = await daemon.client('trainer');
  await client.call(`alloc ${64 * MIB}`);
  const page = await Page.open(browser, daemon.url);
  daemon.process.kill('SIGTERM');
  await page.tab.waitForSelector('#status[data-state=draining]');
  assert.equal(await page.text('#status'), 'draining');
  assert.match(await page.text('#alert'), /waits for the sessions to end/);
  await waitFor('its session', async () => (await page.rows()).map(({name}) => name).join() === 'trainer');
  await page.tab.route('**/api/v1/state', async (route) => {  // the state of the daemon's last half second
    const response = await route.fetch();
    await route.fulfill({response, json: {...await response.json(), state: 'stopping', sessions: []}});
  });
  await page.tab.waitForSelector('#status[data-state=stopping]');
  await page.tab.waitForSelector('#sessions-empty:visible');
  assert.match(await page.text('#sessions-empty'), /^The daemon has closed all sessions\./);
  await page.close();
}

// The page's files, uncompressed, have less than 300 KiB together.
async function size(daemon) {
  const files = ['/', '/style.css', '/icon.svg', '/charts.js', '/charts.css', ...['app', 'chart', 'claims', 'devices', 'dom', 'figures',
    'format', 'history', 'map', 'map_draw', 'map_layout', 'more', 'ooms', 'palette', 'route', 'scopes', 'search', 'session_view',
    'sessions', 'timeline', 'tips'].map((name) => `/${name}.js`)];
  let total = 0;
  for (const file of files) total += (await (await daemon.get(file)).arrayBuffer()).byteLength;
  console.log(`  ${files.length} files, ${(total / 1024).toFixed(1)} KiB`);
  assert.ok(total < 300 * 1024, `${total} bytes`);
}

let daemon = null;
try {
  await withBrowser(async (browser, step) => {
    daemon = await Daemon.start(build, ['--capacity=8GiB']);
    await step('size', () => size(daemon));
    await step('idle', () => idle(browser, daemon));
    const holders = await step('busy', () => busy(browser, daemon));
    await step('silent client', () => silent(browser, daemon, holders));
    await step('refused', () => refused(browser, daemon, holders));
    await step('hostile names', () => hostile(browser, daemon));
    await step('silent daemon', () => lost(browser, daemon));
    // Each of these tests has a new daemon, so the pictures show only the test's sessions.
    for (const [name, run, config] of [['restarted', restarted, 'host_devices: 2'], ['claims', claims], ['large', large], ['fragmentation', fragmentation], ['stopping', stopping]]) {
      daemon.stop();
      daemon = await Daemon.start(build, ['--capacity=8GiB'], config);
      await step(name, () => run(browser, daemon));
    }
  });
} catch (error) {
  console.error(daemon?.log);
  throw error;
} finally {
  daemon?.stop();
}
