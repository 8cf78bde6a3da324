// SPDX-License-Identifier: Apache-2.0
// Figures with their names, and bars of what adds up.
import {el, keyed, setText} from './dom.js';
import {bytes} from './format.js';

// `tip`: what it is; `key`: its part in the bar; `heat`: how urgent it is.
export function figure(name, tip, text, {key = '', heat = ''} = {}) {
  return {name, tip, text, key, heat};
}

// Left out where there is nothing of it, or where that is not known.
export function figureOf(value, name, tip, text, options = {}) {
  return value ? [figure(name, tip, typeof text === 'function' ? text(value) : text, options)] : [];
}

// FRAG: fragmented / held by sessions. What can be given back is held, and not fragmented.
export const fragmentedShare = (fragmented, held) => (held > 0 ? fragmented / held : 0);

// Whether it is worth a look, by a rule of thumb.
export const isFragmented = (fragmented, held) => held >= 2 ** 30 && fragmentedShare(fragmented, held) > 0.3;

export const SHARE_TIP = 'Fragmented, of the reserved memory of sessions: what no trim gives back. ' +
  'Above 30% of 1 GiB or more it is worth a look (a rule of thumb)';

export function showFigures(list, figures) {
  keyed(list, figures, ({name}) => name,
    ({name, key}) => el('div', {},
      el('dt', {}, key === '' ? null : el('i', {class: `key ${key}`}), el('button', {type: 'button', class: 'term'}, name)),
      el('dd', {'data-figure': name.replaceAll(' ', '_')})),
    (entry, {tip, text, heat}) => {
      setText(entry.querySelector('dd'), text);
      entry.querySelector('button').dataset.tip = tip;
      entry.className = heat;
    });
}

// `parts` of `whole`, each [class, name, its bytes of `of`].
export function showBar(bar, parts, of, whole) {
  keyed(bar, parts, ([kind]) => kind, ([kind]) => el('i', {class: kind}), (part, [, , value]) => {
    part.style.width = `${100 * value(of) / whole}%`;
  });
  bar.setAttribute('aria-label', `Of ${bytes(whole)}: ` +
    parts.filter(([, , value]) => value(of) > 0).map(([, name, value]) => `${name} ${bytes(value(of))}`).join(', '));
}
