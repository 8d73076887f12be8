// Colours of runs, metrics and knowledge bases: the same name always has the same one.

const PALETTE = ["#4c78c9", "#d9822b", "#3a9d7a", "#b85fa8", "#c2504a", "#7d8a2e", "#3fa3b8", "#8a6fd1", "#a5744a", "#6b7a8f"];
const taken = new Map();

export function colour(kind, name) {
  if (!taken.has(kind)) taken.set(kind, new Map());
  const names = taken.get(kind);
  if (!names.has(name)) names.set(name, PALETTE[names.size % PALETTE.length]);
  return names.get(name);
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
