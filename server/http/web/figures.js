// SPDX-License-Identifier: Apache-2.0
// Figures with their names, and bars of what adds up.
import {el, keyed, setText} from './dom.js';
import {bytes} from './format.js';

// `title`: what it is; `key`: its part in the bar; `heat`: how urgent it is.
export function figure(name, title, text, {key = '', heat = ''} = {}) {
  return {name, title, text, key, heat};
}

export function showFigures(list, figures) {
  keyed(list, figures, ({name}) => name,
    ({name, key}) => el('div', {},
      el('dt', {}, key === '' ? null : el('i', {class: `key ${key}`}), name),
      el('dd', {'data-figure': name.replaceAll(' ', '_')})),
    (entry, {title, text, heat}) => {
      setText(entry.querySelector('dd'), text);
      entry.title = title;
      entry.className = heat;
    });
}

// `parts` of `whole`, each [class, name, its bytes of `of`].
export function showBar(bar, parts, of, whole) {
  keyed(bar, parts, ([kind]) => kind, ([kind]) => el('i', {class: kind}), (part, [, , value]) => {
    part.style.width = `${100 * value(of) / whole}%`;
  });
  bar.setAttribute('aria-label', `Of ${bytes(whole)}: ` +
    parts.map(([, name, value]) => `${name} ${bytes(value(of))}`).join(', '));
}
