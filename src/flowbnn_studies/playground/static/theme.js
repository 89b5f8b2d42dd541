// Colours of the canvases. Everything else gets its colours from the style sheet.

const query = window.matchMedia("(prefers-color-scheme: dark)");

let cache = new Map();

query.addEventListener("change", () => { cache = new Map(); });

function parse(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

/** Returns a colour of the style sheet as [red, green, blue]. */
export function colour(name) {
  if (!cache.has(name)) {
    cache.set(name, parse(getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()));
  }
  return cache.get(name);
}

/** Returns the colours between certain and uncertain. */
export function ramp() {
  return [0, 1, 2, 3, 4].map((index) => colour(`ramp-${index}`));
}

/** Returns the colour at a place from 0 to 1 of some colours. */
export function between(colours, place) {
  const position = Math.min(Math.max(place, 0), 1) * (colours.length - 1);
  const index = Math.min(Math.floor(position), colours.length - 2);
  const share = position - index;
  return colours[index].map((value, channel) => value + share * (colours[index + 1][channel] - value));
}

/** Calls a function whenever the page becomes dark or light. */
export function onThemeChange(run) {
  query.addEventListener("change", run);
}
