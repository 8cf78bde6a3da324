// SPDX-License-Identifier: Apache-2.0
// Explanations: the text in `data-tip` of what is pointed at, focused or tapped.
import {el} from './dom.js';

const tip = el('div', {id: 'explanation', class: 'explanation tip', role: 'tooltip', hidden: true});
let explained = null;

function hide() {
  explained?.removeAttribute('aria-describedby');
  explained = null;
  tip.hidden = true;
}

// Beside what it explains, which scrolls.
function place() {
  if (explained === null) return;
  const box = explained.getBoundingClientRect();
  const below = box.bottom + 6;
  tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${below + tip.offsetHeight <= innerHeight ? below : Math.max(6, box.top - tip.offsetHeight - 6)}px`;
}

function explain(element) {
  if (element === explained) return;
  hide();
  if (!element?.dataset.tip) return;
  explained = element;
  tip.textContent = element.dataset.tip;
  tip.hidden = false;
  element.setAttribute('aria-describedby', tip.id);
  place();
}

export function startTips() {
  document.body.append(tip);
  const of = (event) => event.target.closest?.('[data-tip]') ?? null;
  document.addEventListener('pointerover', (event) => {
    if (event.pointerType === 'mouse') explain(of(event));
  });
  document.addEventListener('focusin', (event) => explain(of(event)));
  document.addEventListener('focusout', hide);
  document.addEventListener('click', (event) => explain(of(event)));
  document.addEventListener('scroll', place, {capture: true, passive: true});
  addEventListener('hashchange', hide);
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || explained === null) return;
    event.stopPropagation();
    hide();
  }, {capture: true});
}
