// The filters beside the list. Names of one kind are alternatives, kinds add up.

import { many, one, without } from "./address.js";
import { breakable, fill, h } from "./dom.js";
import { thousands } from "./format.js";

const KINDS = [["correct", "Answer"], ["run", "Run"], ["source", "From"], ["kb", "Knowledge base"], ["failure", "Went wrong"], ["dataset", "Questions"]];
const RANGES = [["reward", "Reward"], ["advantage", "Advantage"], ["tokens", "Tokens"], ["searches", "Searches"], ["step", "Step"]];
const SHORT = 12; // names of a kind that are shown at once

export function drawFilters(root, facets, query, change) {
  const set = (name, values) => change([...without(query, name, "offset"), ...values.map((value) => [name, value])]);
  const words = h("input", { type: "search", name: "text", placeholder: "words  ( / )", value: one(query, "text") || "", "aria-label": "words",
    onchange: (event) => set("text", event.target.value ? [event.target.value] : []) });
  const question = one(query, "question");
  const any = without(query, "order", "offset").length;
  const top = root.scrollTop;
  const focused = root.contains(document.activeElement) ? identity(document.activeElement) : null;
  fill(root, words,
    question ? h("button", { class: "chip", title: "all questions", onclick: () => set("question", []) }, `question ${question} ×`) : null,
    RANGES.map(([name, title]) => range(name, title, query, change)),
    KINDS.map(([name, title]) => {
      const chosen = many(query, name), known = facets[name].map(([value]) => value);
      const all = [...facets[name], ...chosen.filter((value) => !known.includes(value)).map((value) => [value, 0])]; // an address may name others
      const shown = all.filter(([value, count]) => count || chosen.includes(value));
      if (shown.length < 2 && !chosen.length) return null;
      return h("fieldset", {}, h("legend", {}, title), choices(name, shown, query, set));
    }),
    any ? h("button", { onclick: () => change(query.filter(([name]) => name === "order")) }, "clear (Esc)") : null);
  root.scrollTop = top;
  if (focused) [...root.querySelectorAll("input, button")].find((one) => identity(one) === focused)?.focus();
}

const identity = (field) => `${field.name} ${field.type === "checkbox" ? field.value : ""}`;

function choices(name, shown, query, set) {
  const chosen = many(query, name);
  const row = ([value, count]) => h("label", { class: count ? "" : "faint", title: value },
    h("input", { type: "checkbox", name, value, checked: chosen.includes(value),
      onchange: (event) => set(name, event.target.checked ? [...chosen, value] : chosen.filter((one) => one !== value)) }),
    h("span", { class: "name" }, breakable(value)), h("span", { class: "num faint" }, thousands(count)));
  const rest = shown.slice(SHORT);
  const open = rest.some(([value]) => chosen.includes(value));
  return [shown.slice(0, SHORT).map(row), rest.length ? h("details", { open }, h("summary", {}, `${rest.length} more`), rest.map(row)) : null];
}

function range(name, title, query, change) {
  const end = (which) => h("input", { inputmode: "decimal", "aria-label": `${title} ${which}`, name: `${name}_${which}`, placeholder: which === "min" ? "least" : "most",
    value: one(query, `${name}_${which}`) || "",
    onchange: (event) => {
      const text = event.target.value.trim().replace(",", ".");
      const kept = without(query, `${name}_${which}`, "offset");
      if (text && Number.isNaN(Number(text))) event.target.setCustomValidity("no number"), event.target.reportValidity();
      else change(text ? [...kept, [`${name}_${which}`, text]] : kept);
    } });
  return h("div", { class: "range" }, h("span", {}, title), end("min"), h("span", { class: "faint" }, "–"), end("max"));
}
