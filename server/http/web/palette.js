// SPDX-License-Identifier: Apache-2.0
// Colours: of the style sheet, resolved for canvases, and one for each session that stays its own.

const COLORS = 10;  // --session-0 to --session-9 in style.css

const probe = document.createElement('span');
probe.className = 'probe';
const resolved = new Map();

// What `var(name)` is in the theme of now: "rgb(...)".
export function color(name) {
  if (!resolved.has(name)) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

// Calls `changed` after the theme has changed.
export function onThemeChange(changed) {
  const forget = () => {
    resolved.clear();
    changed();
  };
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', forget);
  new MutationObserver(forget).observe(document.documentElement, {attributeFilter: ['data-theme']});
}

const places = new Map();  // by session id

// Sessions that are open at the same time get different colours, as far as there are enough.
export function assignColors(sessions) {
  const open = new Set(sessions.map((session) => session.id));
  for (const id of places.keys()) if (!open.has(id)) places.delete(id);
  for (const session of sessions) {
    if (places.has(session.id)) continue;
    const used = new Set(places.values());
    let place = 0;
    while (used.has(place)) ++place;
    places.set(session.id, place);
  }
}

export function sessionColorName(id) {
  const place = places.get(id);
  return place === undefined ? '--muted' : `--session-${place % COLORS}`;
}

// The toggle: as the system says, light, dark. Kept by the browser, where it may.
const THEMES = ['auto', 'light', 'dark'];
export function startTheme(button) {
  let theme = 'auto';
  try {
    theme = localStorage.getItem('theme') ?? 'auto';
  } catch { /* a browser that keeps nothing */ }
  const apply = () => {
    if (!THEMES.includes(theme)) theme = 'auto';
    document.documentElement.dataset.theme = theme;
    button.textContent = {auto: '◐ auto', light: '○ light', dark: '● dark'}[theme];
    button.setAttribute('aria-label', `Colours: ${theme}. Change`);
  };
  button.addEventListener('click', () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem('theme', theme);
    } catch { /* as above */ }
    apply();
  });
  apply();
}
