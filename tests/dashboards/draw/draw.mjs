// SPDX-License-Identifier: Apache-2.0
//
// node draw.mjs JOBS: draws dashboards in headless Chromium, and prints a report of each drawing as JSON. JOBS is a
// JSON file: {prometheus: HOST:PORT, chromium: PATH,
//        jobs: [{dashboard: FILE, picture: FILE, from, to, step (seconds), chosen: {variable: value}, caption}]}.
// The only network is loopback: a page, and the API of Prometheus.
import { build } from 'esbuild';
import fs from 'node:fs';
import http from 'node:http';
import os from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

const { prometheus, chromium: executablePath, jobs } = JSON.parse(fs.readFileSync(process.argv[2]));
const here = path.dirname(fileURLToPath(import.meta.url));
const icons = path.join(here, 'node_modules/@grafana/ui/dist');

await build({ entryPoints: [path.join(here, 'page.jsx')], bundle: true, minify: true, format: 'iife', outfile: path.join(here, 'bundle.js'), logLevel: 'error',
              jsx: 'automatic', define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
              loader: { '.svg': 'text', '.woff2': 'empty', '.ttf': 'empty' } });

const ROW = 34;  // pixels
let job;
const server = http.createServer(async (request, response) => {
  const send = (code, type, body) => { response.writeHead(code, { 'Content-Type': type }); response.end(body); };
  const { pathname } = new URL(request.url, 'http://here');
  try {
    if (pathname === '/') {
      const json = JSON.stringify(job).replaceAll('<', '\\u003c');
      send(200, 'text/html; charset=utf-8', `<!doctype html><link rel="icon" href="data:,"><link rel="stylesheet" href="/bundle.css"><body style="margin:0"><div id="root"></div>
        <script>window.process={env:{}};window.__grafana_public_path__='/public/';window.job=${json}</script><script src="/bundle.js"></script>`);
    } else if (pathname === '/bundle.js') {
      send(200, 'text/javascript', fs.readFileSync(path.join(here, 'bundle.js')));
    } else if (pathname === '/bundle.css') {
      send(200, 'text/css', fs.readFileSync(path.join(here, 'bundle.css')));
    } else if (pathname.startsWith('/api/')) {
      const answer = await fetch(`http://${prometheus}${request.url}`);
      send(answer.status, 'application/json', await answer.text());
    } else {
      const icon = path.normalize(path.join(icons, pathname.replace('/public/build/', '/public/')));
      if (icon.startsWith(icons) && fs.existsSync(icon)) send(200, 'image/svg+xml', fs.readFileSync(icon));
      else send(404, 'text/plain', pathname);
    }
  } catch (error) {
    send(500, 'text/plain', String(error));
  }
});
await new Promise((done) => server.listen(0, '127.0.0.1', done));

const profile = fs.mkdtempSync(path.join(os.tmpdir(), 'vrambroker-chromium-'));
// No call has a time limit, since a slow machine takes longer. The caller ends a script that hangs; stderr names the
// last step.
const browser = await chromium.launchPersistentContext(profile, {
  executablePath, headless: true, timeout: 0, viewport: { width: 1600, height: 1000 },
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});
browser.setDefaultTimeout(0);
const reports = [];
for (const each of jobs) {
  const dashboard = JSON.parse(fs.readFileSync(each.dashboard));
  const height = Math.max(...dashboard.panels.map(({ gridPos }) => (gridPos.y + gridPos.h) * ROW)) + 64;
  job = { ...each, dashboard, height, row: ROW };
  const page = await browser.newPage();
  await page.setViewportSize({ width: 1600, height });  // tables draw only visible rows
  const said = [];
  page.on('console', (message) => { if (['error', 'warning'].includes(message.type())) said.push(`${message.text()} ${message.location().url}`); });
  page.on('pageerror', (error) => said.push(String(error.stack)));
  const failed = new Promise((_, reject) => {
    page.on('pageerror', reject);
    page.on('crash', () => reject(new Error('the page crashed')));
  });
  failed.catch(() => {});  // errors after the report are in `said`
  console.error(`${each.picture}: loading`);
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  console.error(`${each.picture}: drawing`);
  await Promise.race([failed, page.waitForFunction(() => window.report)]);
  const report = await page.evaluate(() => window.report);
  await page.screenshot({ path: each.picture });
  reports.push({ ...report, console: said });
  await page.close();
}
await browser.close();
server.close();
fs.rmSync(profile, { recursive: true, force: true });
console.log(JSON.stringify(reports));
