// SPDX-License-Identifier: Apache-2.0
// The page in Chromium, for tests. `Page` records all faults, and reads the page's figures and rows.
import assert from 'node:assert/strict';
import {mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, statSync} from 'node:fs';
import {tmpdir} from 'node:os';
import path from 'node:path';
import {chromium} from 'playwright-core';
import {PATIENCE_MS, waitFor} from './daemon.mjs';
import {bytes} from './format.mjs';

export const build = process.argv[2];
const pictures = process.argv[3] === '--pictures' ? process.argv[4] : 'pictures';
mkdirSync(pictures, {recursive: true});

export const DESKTOP = {width: 1280, height: 860};
export const PHONE = {width: 360, height: 740};

// The browser itself logs an error for a refused request, here for a session's history that the daemon does not have.
const isRefusedHistory = (message) => /\/timeline\?.*session=/.test(message.location().url);
const axe = readFileSync('node_modules/axe-core/axe.min.js', 'utf8');

export class Page {
  static async open(browser, url, {viewport = DESKTOP, colorScheme = 'light', hasTouch = false, prepare} = {}) {
    const page = new Page();
    page.faults = [];
    page.context = await browser.newContext({viewport, colorScheme, hasTouch, locale: 'en-GB', timezoneId: 'UTC'});
    page.context.setDefaultTimeout(PATIENCE_MS);
    page.tab = await page.context.newPage();
    page.tab.on('console', (message) => {
      if (['error', 'warning'].includes(message.type()) && !isRefusedHistory(message)) page.faults.push(`${message.type()}: ${message.text()}`);
    });
    page.tab.on('pageerror', (error) => page.faults.push(`exception: ${error.stack}`));
    page.tab.on('dialog', (dialog) => {
      page.faults.push(`dialog: ${dialog.message()}`);
      dialog.dismiss();
    });
    page.tab.on('request', (request) => {
      if (!request.url().startsWith(`${url}/`)) page.faults.push(`asks elsewhere: ${request.url()}`);
    });
    if (prepare !== undefined) await prepare(page.tab);
    await page.tab.goto(`${url}/`);
    await page.tab.waitForSelector('#status[data-state=serving]');
    return page;
  }
  async close() {
    await this.tab.unrouteAll({behavior: 'ignoreErrors'});  // drops answers that are still on their way
    assert.deepEqual(this.faults, []);
    await this.context.close();
  }
  text(selector) {
    return this.tab.locator(selector).innerText();
  }
  // Waits until the timeline's last sample equals the daemon's figures of now.
  async showsNowInTimeline(daemon) {
    const {devices: [device]} = await daemon.json('/api/v1/state');
    const said = `now ${bytes(device.inactive_split_bytes)} fragmented, ${bytes(device.reclaimable_bytes)} reclaimable; `;
    await waitFor('the timeline of now', async () => (await this.text('#timeline-note')).startsWith(said));
  }
  async picture(name) {
    const file = path.join(pictures, `${name}.png`);
    await this.tab.screenshot({path: file, animations: 'disabled'});
    assert.ok(statSync(file).size < 200_000, `${file} has ${statSync(file).size} bytes`);
  }
  // Reads the devices' figures; rows() reads the table.
  figures() {
    return this.tab.evaluate(() => Object.fromEntries([...document.querySelectorAll('#devices dd')]
      .map((dd) => [dd.dataset.figure, dd.textContent])));
  }
  rows() {
    return this.tab.evaluate(() => [...document.querySelectorAll('#sessions tbody tr')].map((row) => ({
      name: row.querySelector('th span').textContent,
      details: row.querySelector('th small').textContent,
      reserved: row.querySelector('.usage b').textContent,
      limit: row.querySelector('.usage .text span').textContent,
      cells: [...row.cells].slice(2).map((cell) => cell.textContent),
    })));
  }
}

// Expects no violation of axe's rules, and WCAG's contrast of 4.5 to 1 for all text, also where axe cannot tell.
export async function expectAccessible(page, name) {
  if (!await page.tab.evaluate(() => 'axe' in window)) await page.tab.evaluate(axe);
  const faults = await page.tab.evaluate(async () => {
    const {violations} = await axe.run(document, {resultTypes: ['violations']});
    const found = violations.map(({id, help, nodes}) =>
      `${id}: ${help}: ${nodes.slice(0, 3).map(({html, failureSummary}) => `${html.slice(0, 120)} ${failureSummary}`).join('; ')}`);
    const rgb = (text) => /rgba?\(([^)]*)\)/.exec(text)[1].split(/[ ,/]+/).map(Number);
    const luminance = (color) => {
      const [r, g, b] = color.map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const groundOf = (element) => {
      for (let e = element; e !== null; e = e.parentElement) {
        const ground = rgb(getComputedStyle(e).backgroundColor);
        if (ground.length < 4 || ground[3] > 0) return ground.slice(0, 3);
      }
      return [255, 255, 255];
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text !== null; text = texts.nextNode()) {
      const element = text.parentElement;
      if (text.textContent.trim() === '' || !element.checkVisibility() || element.closest('noscript')) continue;
      const [a, b] = [luminance(rgb(getComputedStyle(element).color).slice(0, 3)), luminance(groundOf(element))];
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < 4.5) found.push(`contrast ${contrast.toFixed(2)}: ${text.textContent.trim().slice(0, 40)}`);
    }
    return found;
  });
  assert.deepEqual(faults, [], name);
}

// Runs `test` with a browser and a function that runs and times each step of the test.
export async function withBrowser(test) {
  const profile = mkdtempSync(path.join(tmpdir(), 'vrambroker-chromium.'));
  const browser = await chromium.launch({
    timeout: PATIENCE_MS,
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    env: {...process.env, HOME: profile, XDG_CONFIG_HOME: profile, XDG_CACHE_HOME: profile},
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
      '--disable-component-update', '--disable-sync'],
  });
  const started = Date.now();
  try {
    await test(browser, async (name, run) => {
      const result = await run();
      console.log(`${name}: ok (${((Date.now() - started) / 1000).toFixed(1)} s)`);
      return result;
    });
    console.log(`pictures: ${readdirSync(pictures).join(' ')}`);
  } finally {
    await browser.close();
    rmSync(profile, {recursive: true, force: true});
  }
}
