// SPDX-License-Identifier: Apache-2.0
//
// Tests the daemon's web page with one session and with many: search, sorting, a session's own view, and the layout.
// Usage: many_test.mjs BUILD_DIR [--pictures DIR]   (run by run.sh)
import assert from 'node:assert/strict';
import {Daemon, waitFor} from './daemon.mjs';
import {bytes, percent} from './format.mjs';
import {expectAllRowsReachable, expectFullCards, expectUsesTheWindow, expectWholeLabels, recordLabels} from './layout.mjs';
import {PHONE, Page, build, expectAccessible, withBrowser} from './page.mjs';

const MIB = 2 ** 20;
const LAPTOP = {width: 1280, height: 720};
const FULL_HD = {width: 1920, height: 1080};
const WIDE = {width: 3840, height: 2160};
const PHONE_390 = {width: 390, height: 844};
const UNSEEN_GAP_MS = 75_000;  // equals UNSEEN_GAP_MS in app.js
const MANY = 200;
const TRAINERS = MANY / 10;

const namesOf = async (page) => (await page.rows()).map((row) => row.name);
const up = (names) => [...names].sort((a, b) => a.localeCompare(b));
// Waits for two answers: the page has sent the second request after the call.
async function refreshed(page) {
  for (let i = 0; i < 2; ++i) {
    const answer = await page.tab.waitForResponse((response) => response.url().endsWith('/api/v1/state'));
    await answer.finished();
  }
}
// Returns the number of groups in the map, one for each session.
const groupsOf = async (page) => Number(await page.tab.locator('#map').getAttribute('data-groups'));

async function start(daemon, count) {
  const clients = {};
  for (let i = 0; i < count; ++i) {
    const name = i % 10 === 3 ? `trainer-${i}` : `job-${i}`;
    const client = clients[name] = await daemon.client(name, String(128 * MIB));
    const blocks = await client.callAll([3, 2, 5, 3, 12].map((mib) => `alloc ${(mib + i % 3) * MIB}`));
    await client.callAll([blocks[0], blocks[2], blocks[4]].map(([index]) => `free ${index}`));
  }
  return clients;
}

// ---- The steps ----

async function layout(browser, daemon, count) {
  const looks = [[LAPTOP, 'light'], [FULL_HD, 'dark'], [PHONE, 'dark'],
    ...(count === 5 ? [[WIDE, 'light'], [PHONE_390, 'light']] : [])];
  for (const [viewport, colorScheme] of looks) {
    const where = `${count} sessions, ${viewport.width} x ${viewport.height}, ${colorScheme}`;
    const page = await Page.open(browser, daemon.url, {viewport, colorScheme, prepare: recordLabels});
    await waitFor('the sessions', async () => (await page.rows()).length === count && await groupsOf(page) >= count);
    await waitFor('a chart', async () => (await page.text('#timeline-note')) !== '');
    await expectFullCards(page, where);
    await expectWholeLabels(page, '#timeline', where);
    if (count === 5) await expectAccessible(page, where);
    const wide = await page.tab.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(wide <= viewport.width, `${where}: ${wide} pixels wide`);
    if (count === MANY) {
      if (viewport === LAPTOP) {
        await page.showsNowInTimeline(daemon);
        await page.picture('many');
      }
      await expectUsesTheWindow(page, '.scroll', where);
      // A note names the visible rows, since scroll bars may be invisible.
      assert.match(await page.text('#sessions-more'), new RegExp(`^Rows \\d+ to ${MANY} of ${MANY}$`));
      await page.tab.locator('#sessions-box').evaluate((box) => box.scrollTo(0, 0));
      await waitFor('the first rows', async () => new RegExp(`^Rows 1 to \\d+ of ${MANY} ↓ scroll for more$`)
        .test(await page.text('#sessions-more')));
      assert.match(await page.text('#map-more'), /^Rows 1 to \d+ of \d+ ↓ scroll for more$/);
      await expectAllRowsReachable(page, where);
      if (viewport.height < 1000) await expectUsesTheWindow(page, '.map-frame', where);
      if (viewport === LAPTOP) await expectAccessible(page, where);
      if (viewport === PHONE) await page.picture('many-phone');
    }
    await page.tab.evaluate(() => document.querySelector('#sessions tbody a').click());
    await waitFor('its map', async () => await groupsOf(page) === 1);
    await waitFor('its history', async () => / ?since /.test(await page.text('#timeline-note')));
    await expectFullCards(page, `${where}, one alone`);
    await expectWholeLabels(page, '#timeline', `${where}, one alone`);
    if (count === 5) await expectAccessible(page, `${where}, one alone`);
    await page.close();
  }
}

async function search(browser, daemon) {
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP});
  const {tab} = page;
  const shows = (count) => waitFor(`${count} sessions`, async () =>
    (await page.rows()).length === count && await groupsOf(page) === count);
  await shows(MANY);
  const [{details}] = await page.rows();

  await tab.keyboard.press('/');
  await tab.keyboard.type('TRAINER');
  await shows(TRAINERS);
  assert.ok((await namesOf(page)).every((name) => name.startsWith('trainer-')));
  assert.equal(await page.text('#search-count'), `${TRAINERS} of ${MANY}`);
  await refreshed(page);
  await shows(TRAINERS);
  await tab.reload();
  await shows(TRAINERS);
  assert.equal(await tab.locator('#search').inputValue(), 'TRAINER');
  await page.picture('search');
  await expectAccessible(page, 'search');

  // The search finds each word, also in the process and the user.
  await tab.locator('#search').fill('trainer 53');
  await waitFor('the session', async () => (await namesOf(page)).includes('trainer-53'));
  await tab.locator('#search').fill(details.split(' · ')[0]);
  await waitFor('the process', async () => (await page.rows()).length < MANY);
  assert.ok((await page.rows()).some((row) => row.details === details));
  await tab.locator('#search').fill('uid:');
  await shows(MANY);

  await tab.locator('#search').fill('no such');
  for (const empty of ['#sessions-empty', '#map-empty']) {
    await waitFor('why there is nothing', async () => (await page.text(empty)) === 'No session matches “no such”.');
  }
  assert.equal(await page.text('#search-count'), `0 of ${MANY}`);
  assert.equal(await page.text('#map-note'), '', 'other sessions hold memory');
  await tab.keyboard.press('Escape');
  await shows(MANY);
  assert.equal(await tab.locator('#search').inputValue(), '');
  assert.equal(await page.text('#search-count'), '');
  await tab.locator('#search').fill('trainer');
  await shows(TRAINERS);
  await tab.locator('#search-clear').click();
  await shows(MANY);
  await page.close();
}

async function sorting(browser, daemon, clients) {
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP});
  const {tab} = page;
  await waitFor('the sessions', async () => (await page.rows()).length === MANY);
  await tab.getByRole('button', {name: 'Session', exact: true}).click();
  const names = await namesOf(page);
  assert.deepEqual(names, up(names));
  await refreshed(page);
  assert.deepEqual(await namesOf(page), names);
  await tab.reload();
  await waitFor('the sessions', async () => (await page.rows()).length === MANY);
  assert.deepEqual(await namesOf(page), names);
  assert.equal(await tab.locator('th[aria-sort=ascending]').innerText(), 'Session ↑');
  await tab.getByRole('button', {name: 'Session ↑'}).click();
  await tab.reload();
  await waitFor('the sessions', async () => (await page.rows()).length === MANY);
  assert.deepEqual(await namesOf(page), [...names].reverse());

  // Rows move only when the figure in the sorted column changes.
  await tab.getByRole('button', {name: 'Allocated', exact: true}).click();
  const wanted = async () => (await daemon.json('/api/v1/sessions')).sessions
    .sort((a, b) => b.devices[0].allocated_bytes - a.devices[0].allocated_bytes || a.id - b.id).map(({name}) => name);
  const last = (await wanted()).at(-1);
  const [index] = await clients[last].call(`alloc ${60 * MIB}`);
  await waitFor('the new first one', async () => (await namesOf(page))[0] === last);
  const order = await wanted();
  assert.equal(order[0], last);
  assert.deepEqual(await namesOf(page), order);
  assert.equal(await tab.locator('th[aria-sort=descending]').innerText(), 'Allocated ↓');
  await clients[last].call(`free ${index}`);
  await waitFor('the old order', async () => (await namesOf(page))[0] !== last);
  assert.deepEqual(await namesOf(page), await wanted());
  await page.close();
}

const historyOf = (page, run, id) => page.tab.evaluate(async ([ofDaemon, session]) => {
  const {historyOf: of, remembered} = await import('/history.js');
  return {...of(ofDaemon, session, 0), all: remembered()};
}, [run, id]);

// A session's view has a history that begins when the page opens, also for times when the page was hidden.
async function history(browser, daemon) {
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP, prepare: recordLabels});
  const {tab} = page;
  await waitFor('the sessions', async () => (await page.rows()).length === MANY);
  const {id} = (await daemon.vramctlJson('sessions')).sessions.at(-1);
  const {run_id: run} = await daemon.json('/api/v1/state');
  await waitFor('a history that nobody looks at', async () => (await historyOf(page, run, id)).time_ms.length >= 4);
  await tab.evaluate((session) => document.querySelector(`#sessions tr[data-session="${session}"] a`).click(), id);
  await waitFor('its view', async () => await tab.locator('#session-title').isVisible());
  assert.ok(Number(await tab.locator('.chart').getAttribute('data-samples')) >= 4);

  // A hidden page asks only for the state.
  const hide = (hidden) => tab.evaluate((value) => {
    Object.defineProperty(document, 'hidden', {configurable: true, get: () => value});
    document.dispatchEvent(new Event('visibilitychange'));
  }, hidden);
  const looks = async () => {  // times of the answers
    const {time_ms: times, unseen_ms: unseen} = await historyOf(page, run, id);
    return times.filter((_, i) => unseen[i] === null);
  };
  const next = async (what) => {
    const {length} = await looks();
    await waitFor(what, async () => (await looks()).length > length);
  };
  await hide(true);
  const before = await looks();
  await next('the first sample that nobody sees');  // earlier requests now have their answers
  const asked = [];
  tab.on('request', (request) => asked.push(new URL(request.url()).pathname));
  await next('the second one, which may have been asked for already');
  await next('the third one');
  const hidden = await looks();
  assert.deepEqual([...new Set(asked)], ['/api/v1/state']);
  await hide(false);
  await waitFor('one that is seen again', async () => (await looks()).length > hidden.length);
  // A hidden page asks seldom, and its pauses leave no gaps. A very busy machine may leave gaps above UNSEEN_GAP_MS.
  const again = (await looks())[hidden.length];
  const {time_ms: times, unseen_ms: unseen} = await historyOf(page, run, id);
  const gaps = unseen.filter((ms, i) => ms !== null && times[i] > before.at(-1) && times[i] < again);
  assert.ok(gaps.every((ms) => ms > UNSEEN_GAP_MS), `gaps of ${gaps.join(', ')} ms while nobody looked`);
  await page.close();
}

// The time axis has labels inside the chart for each range of time.
async function timeAxis(browser, daemon) {
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP, prepare: recordLabels});
  const faults = await page.tab.evaluate(async () => {
    const {Chart} = await import('/chart.js');
    const faults = [];
    for (const width of [318, 700]) {
      const box = document.body.appendChild(document.createElement('div'));
      Object.assign(box.style, {width: `${width}px`, height: '200px'});
      for (let end = 0; end < 600; end += 50) {
        for (let seconds = 60; seconds < 900; seconds += 60) {
          const last = Date.UTC(2026, 10, 30, 14) + 1000 * end;
          const times = [last - 1000 * seconds, last];
          const chart = new Chart(box, {time_ms: times, refusals: [0, 0], waiting: [0, 0], top: 8,
            areas: [{label: 'used', color: '--text', values: [4, 4]}], line: {label: 'limit', value: 8}});
          await new Promise((drawn) => queueMicrotask(drawn));
          const {labels, width: most} = box.querySelector('canvas');
          const shown = labels.filter(({text}) => text.includes(':'));
          if (shown.length === 0) faults.push(`${width} pixels, ${seconds} s until ${end} s: no label`);
          faults.push(...shown.filter(({left, right}) => left < 0 || right > most)
            .map(({text, right}) => `${width} pixels, ${seconds} s until ${end} s: ${text} ends at ${right} of ${most}`));
          chart.remove();
        }
      }
      box.remove();
    }
    return faults;
  });
  assert.deepEqual(faults, []);
  await page.close();
}

// After more than a day the page's own history is bounded. The labels of the time axis name the day, and none is cut.
async function longHistory(browser, daemon) {
  for (const viewport of [LAPTOP, FULL_HD, PHONE]) {
    const where = `${viewport.width} wide, 30 hours`;
    const page = await Page.open(browser, daemon.url, {viewport, prepare: async (each) => {
      await recordLabels(each);
      await each.route('**/api/v1/timeline?*session=*', (route) => route.fulfill({status: 404, body: 'none'}));
    }});
    const {tab} = page;
    await waitFor('the sessions', async () => (await page.rows()).length === MANY);
    const {id} = (await daemon.vramctlJson('sessions')).sessions.at(-1);
    const run = await tab.evaluate(async () => {
      const {remember} = await import('/history.js');
      const {run_id: ofDaemon, sessions} = await (await fetch('/api/v1/sessions')).json();
      const now = Date.now();
      for (let ago = 30 * 3600; ago > 0; ago -= 60) remember(ofDaemon, sessions, Infinity, now - 1000 * ago);
      return ofDaemon;
    });
    await tab.evaluate((session) => document.querySelector(`#sessions tr[data-session="${session}"] a`).click(), id);
    await waitFor('its view', async () => await tab.locator('#session-title').isVisible());
    const labels = await expectWholeLabels(page, '#timeline', where);
    assert.ok(labels.some((text) => /^\d{1,2} [A-Z]/.test(text)), `${where}: ${labels}`);
    const {all, time_ms: times} = await historyOf(page, run, id);
    assert.ok(times.length >= 200 && times.length <= 450 && all <= 100_000, `${where}: ${times.length} of ${all} samples`);
    await expectFullCards(page, where);
    await page.picture(`history-${viewport.width}`);
    await page.close();
  }
}

const cardsOf = (page) => page.tab.evaluate(() => [...document.querySelectorAll('.device, .panel')]
  .filter((card) => card.checkVisibility()).map((card) => card.getAttribute('aria-labelledby')));

async function session(browser, daemon, clients) {
  assert.equal((await clients['trainer-13'].ask(`alloc ${300 * MIB}`))[0], 'error');
  const [index] = await clients['trainer-13'].call(`alloc ${30 * MIB}`);  // the refused request has emptied the cache
  await clients['trainer-13'].call(`free ${index}`);
  assert.equal((await clients['job-14'].ask(`alloc ${300 * MIB}`))[0], 'error');
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP});
  const {tab} = page;
  await tab.locator('#search').fill('trainer');
  const link = tab.getByRole('link', {name: 'trainer-13', exact: true});
  await link.click();

  const {id} = (await daemon.vramctlJson('sessions')).sessions.find((each) => each.name === 'trainer-13');
  const expectIt = async () => {
    assert.match(tab.url(), new RegExp(`[#&]session=${id}(&|$)`));
    await waitFor('its name', async () => (await page.text('#session-title')) === 'trainer-13');
    assert.equal(await tab.locator('#sessions').isVisible(), false);
    assert.equal(await tab.locator('#search').isVisible(), false);
    await waitFor('its map', async () => await groupsOf(page) === 1);
    await waitFor('its refusals', async () => (await tab.locator('#ooms li b').allInnerTexts()).join() === 'trainer-13');
    assert.match(await page.text('#ooms li'), /but only .* of the limit is left/);
  };
  await expectIt();
  // Clients report once a second, and at once when vramctl asks about a single session.
  await daemon.vramctl('summary', String(id));
  const said = (await daemon.vramctlJson('sessions')).sessions.find((each) => each.id === id).devices[0];
  const wanted = {
    reserved: bytes(said.reserved_bytes), allocated: bytes(said.allocated_bytes),
    reclaimable: bytes(said.idle_bytes), fragmented: bytes(said.inactive_split_bytes),
    limit: bytes(said.limit_bytes), guarantee: undefined, refused: '1',
    fragmented_share: percent(said.inactive_split_bytes / said.reserved_bytes),
  };
  assert.ok(said.idle_bytes > 0 && said.inactive_split_bytes > 0);
  await waitFor('its figures', async () => {
    const figures = await tab.evaluate(() => Object.fromEntries([...document.querySelectorAll('#session-figures dd')]
      .map((dd) => [dd.dataset.figure, dd.textContent])));
    return Object.entries(wanted).every(([name, text]) => figures[name] === text);
  });
  const blocks = JSON.parse(await daemon.vramctl('snapshot', String(id), '-o', '-')).segments
    .reduce((sum, segment) => sum + segment.blocks.length, 0);
  await waitFor('its blocks', async () => Number(await tab.locator('#map').getAttribute('data-blocks')) === blocks);
  // The note says when the history begins; the chart includes the limit.
  assert.match(await page.text('#timeline-note'), /since (\d\d:\d\d:\d\d|.+ \d\d:\d\d)(; |$)/);
  assert.ok(Number(await tab.locator('.chart').getAttribute('data-top')) >= said.limit_bytes);
  await waitFor('its history', async () => (await page.text('#timeline .u-legend')).includes(bytes(said.allocated_bytes)));
  assert.equal(await tab.locator('#scopes-panel').isVisible(), false);
  await waitFor('more of it', async () => Number(await tab.locator('.chart').getAttribute('data-samples')) > 3);
  await page.picture('session');

  await tab.reload();
  await expectIt();
  const expectList = () => waitFor('the list', async () => await tab.locator('#sessions').isVisible() &&
    (await page.rows()).length === TRAINERS && await groupsOf(page) === TRAINERS);
  await tab.goBack();
  await expectList();
  assert.equal(await tab.locator('#search').inputValue(), 'trainer');
  await waitFor('all refusals', async () => await tab.locator('#ooms li').count() === 2);
  await tab.goForward();
  await expectIt();
  await tab.locator('#all-sessions').click();
  await expectList();
  // The focus returns to the session's link, for users of a keyboard.
  await waitFor('the focus', () => tab.evaluate(() => document.activeElement.textContent === 'trainer-13'));
  await tab.keyboard.press('Enter');
  await expectIt();
  await tab.keyboard.press('Escape');
  await expectList();

  // A click in the map, which has the table's order, opens the session.
  await tab.getByRole('button', {name: 'Session', exact: true}).click();
  const [first] = await namesOf(page);
  await waitFor('the order', async () => (await tab.locator('#map').getAttribute('data-order')).startsWith(`${first}\n`));
  await refreshed(page);  // the map is drawn
  await tab.evaluate(() => scrollTo(0, 0));
  const box = await tab.locator('#map').boundingBox();
  await tab.mouse.click(box.x + 150, box.y + 12);
  await waitFor('the first of the map', async () => (await page.text('#session-title')) === first);
  await clients[first].goodbye();
  await tab.waitForSelector('#session-gone:visible');
  assert.equal(await page.text('#session-state'), 'ended');
  // An ended session's view has no empty cards.
  await waitFor('full cards', async () => (await cardsOf(page)).join() === 'session-title,timeline-title');
  await expectFullCards(page, 'ended');
  for (const colorScheme of ['light', 'dark']) {
    await tab.emulateMedia({colorScheme});
    await expectAccessible(page, `ended, ${colorScheme}`);
  }
  await tab.emulateMedia({colorScheme: 'light'});
  await page.picture('ended');
  await tab.locator('#all-sessions').click();
  await tab.waitForSelector('#map-panel:visible');
  await tab.waitForSelector('#ooms-panel:visible');
  // An ended session with a refusal keeps the refusal's card.
  await tab.locator('#search').fill('trainer-13');
  await tab.getByRole('link', {name: 'trainer-13', exact: true}).click();
  await waitFor('its name', async () => (await page.text('#session-title')) === 'trainer-13');
  await clients['trainer-13'].goodbye();
  await tab.waitForSelector('#session-gone:visible');
  await waitFor('its cards', async () => (await cardsOf(page)).join() === 'session-title,timeline-title,ooms-title');
  await page.close();

  const other = await Page.open(browser, daemon.url);
  await other.tab.goto(`${daemon.url}/#session=987654`);
  await waitFor('that there is none', async () =>
    (await other.text('#session-gone')) === 'There is no session 987654. It may have ended.');
  await waitFor('one card', async () => (await cardsOf(other)).join() === 'session-title');
  await other.close();
}

// Starts a client with scopes and known figures. Each of ten segments of 20 MiB keeps two or three of five blocks in
// forward/layer3, which pin the holes between them. Then two requests are refused.
const HOSTILE = '<img/src=x/onerror=alert(1)>';
async function startWithScopes(daemon) {
  const client = await daemon.client('layers', String(250 * MIB));
  await client.call(`alloc ${30 * MIB} weights`);
  await client.call(`alloc ${12 * MIB} ${HOSTILE}`);
  const blocks = await client.callAll(Array(50).fill(`alloc ${4 * MIB} forward/layer3`));
  await client.callAll(blocks.filter((_, i) => i % 2 === 1).map(([index]) => `free ${index}`));
  for (const scope of ['backward', 'weights']) {
    assert.equal((await client.ask(`alloc ${100 * MIB} ${scope}`))[0], 'error');
  }
  return client;
}
const SCOPES = [
  ['forward/layer3', '100.00 MiB', '200.00 MiB', '25', '100.00 MiB'],
  ['weights', '30.00 MiB', '30.00 MiB', '1', '0 B'],
  [HOSTILE, '12.00 MiB', '12.00 MiB', '1', '0 B'],
];
const HEADINGS = ['Scope', 'Bytes now', 'At peak', 'Blocks', 'Pins holes'];
const tableOf = (page, selector) => page.tab.evaluate((table) =>
  [...document.querySelectorAll(`${table} tr`)].map((row) => [...row.cells].map((cell) => cell.textContent).slice(0, 5)),
selector);

// A session's view shows the memory of each scope, like vramctl. A refusal shows each scope's memory at the refusal.
async function scopes(browser, daemon) {
  const client = await startWithScopes(daemon);
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP});
  const {tab} = page;
  await waitFor('the map', async () => await groupsOf(page) > 0);
  assert.equal(await tab.locator('#scopes-panel').isVisible(), false);
  await tab.locator('#search').fill('layers');
  await waitFor('it alone', async () => await groupsOf(page) === 1);
  await tab.locator('#map').focus();
  for (let i = 0; i < 90 && !(await page.text('#map-tip')).includes('scope forward/layer3'); ++i) {
    await tab.keyboard.press('ArrowRight');
  }
  assert.match(await page.text('#map-tip'), /scope forward\/layer3/);
  await tab.getByRole('link', {name: 'layers', exact: true}).click();
  await tab.waitForSelector('#scopes-panel:visible');
  assert.deepEqual(await tableOf(page, '#scopes'), [HEADINGS, ...SCOPES]);
  assert.equal(await page.text('#scopes-note'), '3 scopes · 142.00 MiB in blocks');
  const map = await daemon.vramctl('map', 'layers');
  for (const [scope, now, peak, count, pins] of SCOPES) {
    const line = map.split('\n').find((each) => each.endsWith(`  ${scope}`));
    assert.equal(line?.trim().replaceAll(/ {2,}/g, '|'), [now, peak, count, pins, scope].join('|'));
  }

  // The refusal names the request's scope, the scopes with the memory, and the scopes whose blocks pin holes.
  await waitFor('the refusals', async () => await tab.locator('#ooms table').count() === 2);
  assert.deepEqual(await tableOf(page, '#ooms li:last-child table'), [HEADINGS, ...SCOPES]);
  assert.deepEqual(await tab.locator('#ooms th:has(small)').allInnerTexts(), ['weights the request’s']);
  const refusal = await page.text('#ooms li:last-child');
  assert.match(refusal, /asked for 100\.00 MiB on device 0 in scope backward/);
  assert.match(refusal, /segment [0-9a-f]+: \d+\.00 MiB of 20\.00 MiB fragmented, \d blocks in use, one of 4\.00 MiB in scope forward\/layer3 held/);
  await expectFullCards(page, 'scopes');
  await expectAccessible(page, 'scopes');
  await page.picture('scopes');
  await tab.setViewportSize(PHONE);
  await waitFor('whole words on a phone', async () => (await tab.locator('#scopes tbody th').first().boundingBox()).height < 60);
  const wide = await tab.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(wide <= PHONE.width, `${wide} pixels wide`);
  await tab.setViewportSize(LAPTOP);
  await tab.locator('#all-sessions').click();
  await tab.waitForSelector('#scopes-panel', {state: 'hidden'});

  await client.goodbye();
  await page.close();
}

// The samples end at a full minute, so the last label lies at the end of the time axis.
async function labels(browser, daemon) {
  for (const viewport of [LAPTOP, FULL_HD, PHONE]) {
    const page = await Page.open(browser, daemon.url, {viewport, prepare: async (tab) => {
      await recordLabels(tab);
      await tab.route('**/api/v1/timeline*', async (route) => {
        const response = await route.fetch();
        const json = await response.json();
        const length = json.time_ms.length;
        const end = Math.ceil(json.time_ms.at(-1) / 60000) * 60000;
        json.time_ms = json.time_ms.map((_, i) => end - 2000 * (length - 1 - i));
        await route.fulfill({response, json});
      });
    }});
    await expectWholeLabels(page, '#timeline', `${viewport.width} wide`);
    await page.close();
  }
}

// Edits the daemon's answers at `path` before the page gets the answers.
async function change(tab, path, edit) {
  await tab.route(`**/api/v1/${path}`, async (route) => {
    const response = await route.fetch();
    const json = await response.json();
    edit(json);
    await route.fulfill({response, json});
  });
}

// The page shows a session's user and command, and a GPU's sensors; unknown values have no text.
async function facts(browser, daemon) {
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP, prepare: (tab) => change(tab, 'state', (json) => {
    Object.assign(json.devices[0], {use_percent: 0, temperature_celsius: 61.4, power_watts: null});
    json.sessions.forEach((session) => Object.assign(session, {user: '', command: '', idle_ms: null}));
    Object.assign(json.sessions[0], {user: 'alice', command: 'python3 train.py', idle_ms: 185_000});
    json.sessions[1] = Object.fromEntries(Object.entries(json.sessions[1])
      .filter(([name]) => !['user', 'command', 'idle_ms'].includes(name)));
  })});
  const {tab} = page;
  await waitFor('the rows', async () => (await page.rows()).length === 5);
  const figures = await page.figures();
  assert.deepEqual([figures.GPU_use, figures.temperature, figures.power], ['0 %', '61 °C', undefined]);
  const rows = await page.rows();
  const alices = rows.find(({details}) => /^pid \d+ · alice · python3 train\.py$/.test(details));
  assert.equal(alices.cells.at(-2), '3 min ago');
  assert.equal(rows.filter(({cells}) => cells.at(-2) === '–').length, 4);
  assert.ok(rows.every(({cells}) => /^[\d.]+ (s|min|h .*)$/.test(cells.at(-1))), JSON.stringify(rows));
  for (const word of ['alice', 'train.py']) {
    await tab.locator('#search').fill(word);
    await waitFor(`who has ${word}`, async () => (await namesOf(page)).join() === alices.name);
  }
  await tab.locator('#sessions a').first().click();
  await waitFor('its view', async () => (await page.text('#session-title')) === alices.name);
  assert.match(await page.text('#session-details'), /^id \d+ · pid \d+ · alice · python3 train\.py · uid:\d+$/);
  assert.equal(await tab.locator('[data-figure=last_use]').innerText(), '3 min ago');
  assert.match(await tab.locator('[data-figure=age]').innerText(), /^[\d.]+ (s|min)$/);
  assert.doesNotMatch(await page.text('body'), /undefined|null|NaN/);
  await page.close();
}

// The page prefers the daemon's history of a session to its own. A note gives a limit that is far above the chart.
async function keptHistory(browser, daemon) {
  const begin = Date.UTC(2030, 0, 1);
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP, prepare: async (tab) => {
    await change(tab, 'state', (json) => json.sessions.forEach(({devices}) => { devices[0].limit_bytes = 2 ** 40; }));
    const {run_id} = await daemon.json('/api/v1/state');
    await tab.route('**/api/v1/timeline?*session=*', (route) => route.fulfill({json: {run_id, device: 0,
      time_ms: Array.from({length: 700}, (_, i) => begin + 2000 * i), reserved_bytes: Array(700).fill(40 * MIB),
      allocated_bytes: Array(700).fill(10 * MIB)}}));
  }});
  await page.tab.locator('#sessions a').first().click();
  await waitFor('its history', async () => (await page.text('#timeline-note')) ===
    'since 1 Jan 00:00; the limit, 1.00 TiB, is far above');
  assert.equal(await page.tab.locator('.chart').getAttribute('data-samples'), '700');
  const legend = await page.text('#timeline .u-legend');
  for (const text of ['30.00 MiB', '10.00 MiB', '1.00 TiB']) assert.ok(legend.includes(text), legend);
  await page.close();
}

// A meaning has the same colour in bar, map and legend. Sessions differ in colour. The map has the table's order.
async function colours(browser, daemon) {
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP});
  const {tab} = page;
  await waitFor('the map', async () => await groupsOf(page) >= 5);
  const names = await namesOf(page);
  for (const heading of ['Session', 'Session ↑']) {
    await tab.getByRole('button', {name: heading, exact: true}).click();
    const order = await namesOf(page);
    await waitFor('the order of the table', async () =>
      (await tab.locator('#map').getAttribute('data-order')).split('\n').slice(0, names.length).join() === order.join());
  }
  const dots = await tab.locator('#sessions .dot').evaluateAll((all) => all.map((dot) => getComputedStyle(dot).backgroundColor));
  assert.equal(new Set(dots).size, dots.length);
  await tab.locator('#sessions a').first().click();
  await waitFor('its map', async () => await groupsOf(page) === 1);
  for (const colorScheme of ['light', 'dark']) {
    await tab.emulateMedia({colorScheme});
    await tab.locator('#map').focus();
    await tab.keyboard.press('ArrowUp');
    for (let i = 0; i < 20 && !/ fragmented\n/.test(await page.text('#map-tip')); ++i) await tab.keyboard.press('ArrowRight');
    await waitFor('one colour', async () => await tab.evaluate(() => {
      const map = document.getElementById('map');
      const [box, mark] = [map, document.getElementById('map-mark')].map((element) => element.getBoundingClientRect());
      const scale = map.width / box.width;
      const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
      copy.drawImage(map, scale * (box.left - mark.left - mark.width / 2), scale * (box.top - mark.top - mark.height / 2));
      const pixel = copy.getImageData(0, 0, 1, 1).data;
      const seen = ['#session-bar .fragmented', '.key.fragmented', '.swatch.fragmented'].map((selector) =>
        getComputedStyle(document.querySelector(selector)).backgroundColor);
      return seen.every((color) => color === `rgb(${[...pixel].slice(0, 3).join(', ')})`);
    }));
  }
  await page.close();
}

// The page works without a mouse. Each control gets the focus in turn, and shows the focus. The focus or a tap shows a
// word's explanation; Escape hides the explanation.
async function keyboard(browser, daemon) {
  const page = await Page.open(browser, daemon.url, {viewport: LAPTOP});
  const {tab} = page;
  await waitFor('the rows', async () => (await page.rows()).length === 5);
  const wanted = await tab.evaluate(() => [...document.querySelectorAll('a[href], button, input, select, [tabindex="0"]')]
    .filter((element) => element.checkVisibility()).length);
  await tab.evaluate(() => { window.focused = new Set(); });
  for (let i = 0; i < wanted; ++i) {
    await tab.keyboard.press('Tab');
    const fault = await tab.evaluate((first) => {
      const element = document.activeElement;
      window.focused.add(element);
      if (first && !element.classList.contains('skip')) return 'the first is no link to the contents';
      const marked = element.closest('.search') ?? element;
      return getComputedStyle(marked).outlineStyle === 'none' ? `no mark: ${element.outerHTML}` : null;
    }, i === 0);
    assert.equal(fault, null);
  }
  assert.equal(await tab.evaluate(() => window.focused.size), wanted);
  const explained = tab.locator('#explanation');
  for (const [name, text] of [['fragmented share', /^Fragmented, of the reserved memory/], ['free', /^Can be given to somebody/]]) {
    await tab.getByRole('button', {name, exact: true}).focus();
    assert.match(await explained.innerText(), text);
    assert.equal(await tab.evaluate(() => document.activeElement.getAttribute('aria-describedby')), 'explanation');
  }
  await tab.keyboard.press('Escape');
  assert.equal(await explained.isVisible(), false);
  assert.equal(await tab.locator('[title]').count(), 0, 'a title is for the mouse alone');
  await page.close();

  const phone = await Page.open(browser, daemon.url, {viewport: PHONE_390, hasTouch: true});
  await waitFor('the rows', async () => (await phone.rows()).length === 5);
  await phone.tab.getByRole('button', {name: 'fragmented', exact: true}).tap();
  assert.match(await phone.text('#explanation'), /^Free blocks in segments/);
  // A phone's card shows all figures that are not zero, and cuts none.
  const cut = await phone.tab.evaluate(() => [...document.querySelectorAll('#sessions :is(th, td)')]
    .filter((cell) => cell.checkVisibility() && cell.getBoundingClientRect().right > innerWidth).length);
  assert.equal(cut, 0);
  const [card] = await phone.tab.locator('#sessions tbody tr').allInnerTexts();
  for (const label of ['Allocated', 'Fragmented', 'Frag', 'State', 'Age']) {
    assert.ok(await phone.tab.locator(`#sessions tbody tr:first-child td[data-label="${label}"]`).isVisible(), `${label}: ${card}`);
  }
  await phone.tab.locator('#sort').selectOption('name');
  await waitFor('by name', async () => (await namesOf(phone)).join() === up(await namesOf(phone)).join());
  await phone.close();
}

// Each kind of memory has a name of its own: "idle" once named two kinds.
async function words(browser, daemon) {
  const page = await Page.open(browser, daemon.url);
  const said = () => page.tab.evaluate(() => [document.body.innerText,
    ...[...document.querySelectorAll('[data-tip], [aria-label]')].map(({dataset, ariaLabel}) => `${dataset.tip} ${ariaLabel}`),
  ].join('\n'));
  await waitFor('a chart', async () => (await page.text('#timeline-note')) !== '');
  for (const word of ['cached by the daemon', 'cached', 'fragmented', 'reclaimable']) {
    assert.ok((await said()).includes(word), `${word} is missing`);
  }
  assert.doesNotMatch(await said(), /\bidle\b/i);
  // "free" is unreserved memory, and names no part of a session's memory.
  const legend = await page.tab.locator('.legend li').allInnerTexts();
  assert.ok(legend.includes('fragmented') && legend.includes('reclaimable'), legend.join());
  for (const text of [...legend, await page.text('#timeline-note'), await page.tab.locator('#map-summary').textContent()])
    assert.doesNotMatch(text, /\bfree\b/i);
  await page.tab.locator('#sessions a').first().click();
  await page.tab.waitForSelector('#session-title:visible');
  assert.doesNotMatch(await said(), /\bidle\b/i);
  await page.close();
}

// Each of several devices has a card, never cut. The map, the table and the chart show the chosen device.
async function severalDevices(browser, daemon, count) {
  for (const viewport of [LAPTOP, PHONE_390, WIDE]) {
    const where = `${count} devices, ${viewport.width} x ${viewport.height}`;
    const page = await Page.open(browser, daemon.url, {viewport});
    const {tab} = page;
    await waitFor('the rows', async () => (await page.rows()).length === 2);
    const cards = tab.locator('#devices .device');
    assert.equal(await cards.count(), count, where);
    await expectFullCards(page, where);
    await expectAccessible(page, where);
    const cut = await tab.evaluate(() => [...document.querySelectorAll('#devices .device *')]
      .filter((element) => element.checkVisibility() && element.getBoundingClientRect().right > innerWidth).length);
    assert.equal(cut, 0, where);
    assert.match(await cards.nth(0).innerText(), /reserved\n64\.00 MiB/, where);
    assert.match(await cards.nth(2).innerText(), /reserved\n32\.00 MiB/, where);
    const reserved = async (name) => (await page.rows()).find((row) => row.name === name).reserved;
    assert.deepEqual([await reserved('on-first'), await reserved('on-third')], ['64.00 MiB', '0 B'], where);
    await cards.nth(2).getByRole('button', {name: 'Show'}).click();
    await waitFor('the other device', async () => await reserved('on-third') === '32.00 MiB' && await reserved('on-first') === '0 B');
    await waitFor('its map', async () => /32\.00 MiB/.test(await tab.locator('#map-summary').textContent()));
    assert.match(tab.url(), /[#&]device=2(&|$)/, where);
    await page.close();
  }
}

let daemon = null;
try {
  await withBrowser(async (browser, step) => {
    for (const count of [1, 5]) {
      daemon = await Daemon.start(build, ['--capacity=4GiB']);
      await start(daemon, count);
      await step(`layout, ${count}`, () => layout(browser, daemon, count));
      if (count === 5) {
        await step('labels', () => labels(browser, daemon));
        await step('words', () => words(browser, daemon));
        await step('facts', () => facts(browser, daemon));
        await step('kept history', () => keptHistory(browser, daemon));
        await step('colours', () => colours(browser, daemon));
        await step('keyboard', () => keyboard(browser, daemon));
        await step('scopes', () => scopes(browser, daemon));
      }
      daemon.stop();
    }
    daemon = await Daemon.start(build, ['--capacity=256MiB'], 'host_devices: 4\n');
    for (const [name, size, device] of [['on-first', '64MiB', 0], ['on-third', '32MiB', 2]]) {
      daemon.spawn('client/vramctl', ['hold', size, `--device=${device}`, `--name=${name}`]);
    }
    await waitFor('what they hold', async () => (await daemon.vramctlJson('sessions')).sessions
      .filter(({devices}) => devices.some((held) => held.allocated_bytes > 0)).length === 2);
    await step('several devices', () => severalDevices(browser, daemon, 4));
    daemon.stop();
    daemon = await Daemon.start(build, ['--capacity=16GiB']);
    const clients = await start(daemon, MANY);
    await step(`layout, ${MANY}`, () => layout(browser, daemon, MANY));
    await step('search', () => search(browser, daemon));
    await step('sorting', () => sorting(browser, daemon, clients));
    await step('history', () => history(browser, daemon));
    await step('time axis', () => timeAxis(browser, daemon));
    await step('long history', () => longHistory(browser, daemon));
    await step('session', () => session(browser, daemon, clients));
  });
} catch (error) {
  console.error(daemon?.log);
  throw error;
} finally {
  daemon?.stop();
}
