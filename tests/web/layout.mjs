// SPDX-License-Identifier: Apache-2.0
// Checks of the page's layout as the browser draws the page.
import assert from 'node:assert/strict';
import {waitFor} from './daemon.mjs';

// Expects no large gap in any card, between contents or below the contents.
export async function expectFullCards(page, where) {
  let found = null;
  try {
    await waitFor('full cards', async () => {
      found = await page.tab.evaluate(() => [...document.querySelectorAll('.device, .panel')]
        .filter((card) => card.checkVisibility()).map((card) => {
          const boxes = [...card.querySelectorAll('*')].filter((element) => element.checkVisibility() &&
            (element.childElementCount === 0 || ['P', 'SELECT'].includes(element.tagName)) && !element.closest('.hidden, .tip, .mark'))
            .map((element) => element.getBoundingClientRect()).filter((box) => box.height > 1)
            .sort((a, b) => a.top - b.top);
          const box = card.getBoundingClientRect();
          let end = box.top;
          let gap = 0;
          for (const each of [...boxes, {top: box.bottom, bottom: box.bottom}]) {
            gap = Math.max(gap, each.top - end);
            end = Math.max(end, each.bottom);
          }
          return {
            card: card.getAttribute('aria-labelledby') ?? card.getAttribute('aria-label'),
            gap: Math.round(gap),
            height: Math.round(box.height),
          };
        }).filter(({gap, height}) => gap > Math.max(32, 0.12 * height)));
      return found.length === 0;
    });
  } catch (error) {
    assert.deepEqual(found, [], where);
    throw error;
  }
}

// Expects that the card around `scroller` is as high as the window below the header, that the contents scroll to their
// end, and that headings stay in place.
export async function expectUsesTheWindow(page, scroller, where) {
  const seen = await page.tab.evaluate(async (selector) => {
    const inner = [...document.querySelectorAll(selector)].find((element) => element.checkVisibility());
    const card = inner.closest('.panel');
    card.scrollIntoView();
    const frames = async () => {
      for (let i = 0; i < 3; ++i) await new Promise((resolve) => requestAnimationFrame(resolve));
    };
    await frames();
    const header = document.querySelector('.top').getBoundingClientRect();
    const box = card.getBoundingClientRect();
    const before = {top: box.top, bottom: box.bottom, height: box.height};
    inner.scrollTop = inner.scrollHeight;
    await frames();
    const frame = inner.getBoundingClientRect();
    const head = [...inner.querySelectorAll('thead th')].find((each) => each.checkVisibility())?.getBoundingClientRect();
    const canvas = inner.querySelector('canvas')?.getBoundingClientRect();
    const last = inner.querySelector('tbody tr:last-child')?.getBoundingClientRect();
    return {
      ...before, room: innerHeight - header.bottom, headerAt: header.top, header: header.bottom, scrolled: inner.scrollTop,
      head: head === undefined ? 0 : head.top - frame.top,
      end: (canvas ?? last).bottom - frame.bottom,
      canvas: canvas === undefined ? 1 : canvas.height / frame.height,
    };
  }, scroller);
  const text = `${where}: ${scroller} ${JSON.stringify(seen)}`;
  assert.equal(seen.headerAt, 0, text);
  assert.ok(seen.height >= seen.room - 90 && seen.height <= seen.room, text);
  assert.ok(seen.top >= seen.header && seen.top <= seen.header + 20, text);
  assert.ok(seen.scrolled > 0, text);
  assert.ok(Math.abs(seen.head) <= 1, text);
  assert.ok(seen.end <= 1, text);
  assert.ok(seen.canvas > 0.9, text);
}

// Makes the page record each text that the page writes on a canvas, with its place.
export async function recordLabels(tab) {
  await tab.addInitScript(() => {
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function fillText(text, x, y, ...rest) {
      const {a, e} = this.getTransform();
      const {actualBoundingBoxLeft, actualBoundingBoxRight} = this.measureText(text);
      (this.canvas.labels ??= []).push({text, left: e + a * (x - actualBoundingBoxLeft),
        right: e + a * (x + actualBoundingBoxRight), width: this.canvas.width});
      return write.call(this, text, x, y, ...rest);
    };
  });
}

export function labelsOf(tab, parent) {
  return tab.evaluate((selector) => document.querySelector(`${selector} canvas`)?.labels ?? [], parent);
}

// Expects that the time axis's labels are inside the chart and do not touch each other. Resolves to the labels.
export async function expectWholeLabels(page, parent, where) {
  const times = await waitFor('labels', async () => {
    const drawn = (await labelsOf(page.tab, parent)).filter(({text}) => !/^0$|B$/.test(text));  // not sizes
    return drawn.length > 1 ? drawn : null;
  });
  let before = null;
  for (const {text, left, right, width} of times) {
    assert.ok(left >= 0 && right <= width, `${where}: ${text} from ${left} to ${right} of ${width}`);
    // The chart's next drawing begins at the left again.
    if (before !== null && left > before.left) {
      assert.ok(left > before.right, `${where}: ${text} from ${left}, and ${before.text} to ${before.right}`);
    }
    before = {text, left, right};
  }
  return times.map(({text}) => text);
}

// Expects that scrolling brings each row of the table into view, where a click reaches the row's link. The function
// waits for no frame: scrolling and elementFromPoint() lay the page out by themselves, and a busy machine's frames are
// slow.
export async function expectAllRowsReachable(page, where) {
  const hidden = await page.tab.evaluate(() => {
    const faults = [];
    for (const row of document.querySelectorAll('#sessions tbody tr')) {
      row.scrollIntoView({block: 'center'});
      const link = row.querySelector('a');
      const box = link.getBoundingClientRect();
      const there = document.elementFromPoint(box.left + 12, (box.top + box.bottom) / 2);
      if (!link.contains(there)) faults.push(`${link.textContent}: ${there?.outerHTML.slice(0, 80)}`);
    }
    return faults;
  });
  assert.deepEqual(hidden, [], where);
}
