// SPDX-License-Identifier: Apache-2.0
// Says of a box that scrolls what of it is in view: many systems show a scroll bar only while it moves.
import {setText} from './dom.js';

// `ends`: where each thing in `scroller` ends, in pixels of its contents; `covered`: pixels that a heading covers.
export function showMore(scroller, hint, what, ends, covered = 0) {
  const {scrollTop, clientHeight, scrollHeight, scrollLeft, clientWidth, scrollWidth} = scroller;
  const below = scrollHeight - scrollTop - clientHeight > 1;
  const right = scrollWidth - scrollLeft - clientWidth > 1;
  Object.assign(scroller.parentElement.dataset, {below: String(below), right: String(right)});
  const parts = [];
  if (scrollHeight - clientHeight > 1) {
    const first = ends.filter((end) => end <= scrollTop + covered + 1).length + 1;
    const last = ends.filter((end) => end <= scrollTop + clientHeight + 1).length;
    parts.push(`${what} ${first} to ${Math.max(first, last)} of ${ends.length}${below ? ' ↓ scroll for more' : ''}`);
  }
  if (right) parts.push('more columns → scroll to the right');
  hint.hidden = parts.length === 0;
  setText(hint, parts.join(' · '));
}

// The same of a box whose contents are elements: `things()`.
export function watchMore(scroller, hint, what, things) {
  const show = () => {
    const top = scroller.getBoundingClientRect().top - scroller.scrollTop;
    const head = scroller.querySelector('thead')?.offsetHeight ?? 0;
    showMore(scroller, hint, what, things().map((thing) => thing.getBoundingClientRect().bottom - top), head);
  };
  scroller.addEventListener('scroll', show, {passive: true});
  const sizes = new ResizeObserver(show);
  sizes.observe(scroller);
  for (const child of scroller.children) sizes.observe(child);
}
