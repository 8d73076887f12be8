// Elements from data, with the colours, numbers and labels that all views share. Every text becomes a text node, so nothing that a
// record says is ever read as HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return add(element, children);
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return add(element, children);
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

// A name that may go on in the next line after each of its / and _.
export const breakable = (name) => name.split(/(?<=[/_])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

export const byId = (id) => document.getElementById(id);

const PALETTE = ["#4c78c9", "#d9822b", "#3a9d7a", "#b85fa8", "#c2504a", "#7d8a2e", "#3fa3b8", "#8a6fd1", "#a5744a", "#6b7a8f"];
const taken = new Map();

// Of runs, metrics and knowledge bases: the same name always has the same colour.
export function colour(kind, name) {
  if (!taken.has(kind)) taken.set(kind, new Map());
  const names = taken.get(kind);
  if (!names.has(name)) names.set(name, PALETTE[names.size % PALETTE.length]);
  return names.get(name);
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

export const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 2)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const thousands = (count) => count.toLocaleString("en-GB");

// One tooltip for all: what `text` gives for the element under the pointer.
export function tipOn(container, text) {
  const tip = byId("tip");
  container.addEventListener("mousemove", (event) => {
    const said = text(event.target);
    tip.hidden = !said;
    if (!said) return;
    tip.textContent = said;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const top = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  });
  container.addEventListener("mouseleave", () => { tip.hidden = true; });
}

export const where = (row) => [row.source === "training" ? `step ${row.step}` : row.source, row.sample ? `#${row.sample}` : ""].filter(Boolean).join(" ");
export const kbDot = (name) => h("span", { class: "kb" }, h("i", { style: { background: colour("kb", name) } }), name);
export const outcome = (correct) => h("i", { class: `outcome ${correct === 1 ? "right" : correct === 0 ? "wrong" : "open"}`,
  title: correct === 1 ? "right" : correct === 0 ? "wrong" : "no gold answer" }, correct === 1 ? "✓" : correct === 0 ? "✗" : "·");
export const kbLabel = (name) => h("b", { class: "label", style: { color: colour("kb", name) } }, name);
export const FIELDS = "input:not([type=checkbox]), select, textarea"; // whose keys are their own
