// SPDX-License-Identifier: Apache-2.0
// Colours: of the style sheet, resolved for canvases, and one for each session that stays its own.

// Hues of sessions, in degrees of OKLCH: all but the reds, which are fragmented. Their order sets neighbours far apart.
const HUES = 12;
const FIRST_HUE = 50;
const HUE_STEP = 26.5;
const SHADES = [[0.55, 0.75], [0.67, 0.87], [0.41, 0.62]];  // lightness in the light theme and in the dark one

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
let defined = 0;

// Halves the steps between hues again and again: 0, 1/2, 1/4, 3/4, 1/8, ...
function between(round) {
  let [value, part] = [0, 0.5];
  for (let rest = round; rest > 0; rest >>= 1, part /= 2) value += part * (rest & 1);
  return value;
}

// Makes --session-0 up to --session-`place`. First come all hues, then all of them in other shades, then hues between them.
function defineColors(place) {
  for (; defined <= place; ++defined) {
    const round = Math.floor(defined / (HUES * SHADES.length));
    const hue = FIRST_HUE + HUE_STEP * ((5 * defined + 8) % HUES + between(round));
    const [light, dark] = SHADES[Math.floor(defined / HUES) % SHADES.length];
    const of = (lightness, chroma) => `oklch(${lightness} ${chroma} ${hue.toFixed(1)})`;
    document.documentElement.style.setProperty(`--session-${defined}`, `light-dark(${of(light, 0.14)}, ${of(dark, 0.12)})`);
  }
}

// Sessions that are open at the same time get different colours.
export function assignColors(sessions) {
  const open = new Set(sessions.map((session) => session.id));
  for (const id of places.keys()) if (!open.has(id)) places.delete(id);
  for (const session of sessions) {
    if (places.has(session.id)) continue;
    const used = new Set(places.values());
    let place = 0;
    while (used.has(place)) ++place;
    places.set(session.id, place);
    defineColors(place);
  }
}

export function sessionColorName(id) {
  const place = places.get(id);
  return place === undefined ? '--muted' : `--session-${place}`;
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
