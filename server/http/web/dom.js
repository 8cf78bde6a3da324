// SPDX-License-Identifier: Apache-2.0
// Elements made without markup: whatever comes from the daemon is text, and never becomes anything else.

// el('td', {class: 'number', title: text}, child, ...): children are nodes or texts.
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false || value === null) continue;
    element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Sets a text only where it changed, so that screen readers hear of changes alone and selections survive.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Children of `parent` for `items`, by key: those that stay keep their place, focus and listeners.
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map();
  for (const child of [...parent.children]) old.set(child.dataset.key, child);
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = old.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    old.delete(key);
    update(child, item);
    if (child === place) {
      place = place.nextElementSibling;
    } else {
      parent.insertBefore(child, place);
    }
  }
  for (const child of old.values()) child.remove();
}
