// The explorer: filters, the list of episodes that pass, and the episode that is chosen.

import { get, go, many, note, one, without } from "./api.js";
import { breakable, FIELDS, fill, h, kbDot, number, outcome, signed, thousands, where } from "./dom.js";
import { EpisodePane } from "./episode.js";

const OWN = ["key", "tab"]; // of the address: what is chosen, and not the filter

export class Explorer {
  constructor(root) {
    this.filters = h("aside", { class: "filters" });
    this.list = h("section", { class: "list", tabindex: 0 });
    this.pane = h("section", { class: "pane" });
    this.episode = new EpisodePane(this.pane, { tab: (tab) => this.tab(tab) });
    this.marked = JSON.parse(sessionStorage.getItem("marked") || "[]");
    fill(root, h("div", { class: "explorer" }, this.filters, this.list, this.pane));
    this.asked = 0;
  }

  open(query, state) {
    this.query = query;
    this.state = state;
    this.load();
  }

  async refresh(state, before) {
    this.state = state;
    if (state.version !== before.version) await this.load(true);
  }

  // `live`: something new may be there; what the reader looks at stays.
  async load(live = false) {
    const asked = ++this.asked;
    const filter = without(this.query, ...OWN);
    let found;
    try {
      found = await get("/api/episodes", [...filter, ["limit", PAGE]]);
    } catch (error) {
      if (asked === this.asked) fill(this.list, h("p", { class: "empty bad" }, error.message));
      return;
    }
    if (asked !== this.asked) return;
    this.found = found;
    const typing = this.filters.contains(document.activeElement) && document.activeElement.matches(FIELDS);
    if (!live || !typing) drawFilters(this.filters, found.facets, filter, (next) => this.filter(next));
    const key = one(this.query, "key");
    if (!key && found.rows.length) this.choose(found.rows[0].key);
    else this.drawList();
    if (key) this.episode.open(key, this.state.version, one(this.query, "tab"));
    else if (!found.rows.length) this.episode.empty();
  }

  drawList() {
    drawList(this.list, this.found, one(this.query, "key"), this.marked, one(this.query, "order") || "new", {
      choose: (key) => this.choose(key),
      order: (order) => this.filter([...without(this.query, ...OWN, "order", "offset"), ["order", order]]),
      page: (offset) => this.filter([...without(this.query, ...OWN, "offset"), ["offset", offset]]),
    });
  }

  // Another filter in the place of this one. The view of the episode stays as it is.
  filter(next) {
    go("episodes", [...next, ...this.query.filter(([name]) => name === "tab")]);
  }

  choose(key) {
    this.query = [...without(this.query, "key"), ["key", key]];
    note("episodes", this.query);
    this.drawList();
    this.episode.open(key, this.state.version, one(this.query, "tab"));
  }

  tab(tab) {
    this.query = [...without(this.query, "tab"), ["tab", tab]];
    note("episodes", this.query);
  }

  mark(key) {
    if (!key) return;
    this.marked = this.marked.includes(key) ? this.marked.filter((other) => other !== key) : [...this.marked, key];
    sessionStorage.setItem("marked", JSON.stringify(this.marked));
    this.drawList();
  }

  key(event) {
    const rows = this.found?.rows ?? [];
    const at = rows.findIndex((row) => row.key === one(this.query, "key"));
    const offset = Number(one(this.query, "offset") || 0);
    const page = (next) => this.filter([...without(this.query, ...OWN, "offset"), ["offset", next]]);
    if (event.key === "j" && at + 1 < rows.length) this.choose(rows[at + 1].key);
    else if (event.key === "k" && at > 0) this.choose(rows[at - 1].key);
    else if (event.key === "n" && offset + PAGE < this.found.total) page(offset + PAGE);
    else if (event.key === "p" && offset > 0) page(Math.max(offset - PAGE, 0));
    else if (event.key === "/") this.filters.querySelector("input[type=search]")?.focus();
    else if (event.key === "x") this.mark(one(this.query, "key"));
    else if (event.key === "c") go("compare", this.marked.map((key) => ["key", key]));
    else if (event.key === "Escape") this.filter(many(this.query, "order").map((order) => ["order", order]));
    else return this.episode.key(event);
    return true;
  }
}

// --- The filters beside the list. Names of one kind are alternatives, kinds add up. ---

const KINDS = [["correct", "Answer"], ["run", "Run"], ["source", "From"], ["kb", "Knowledge base"], ["failure", "Went wrong"], ["dataset", "Questions"]];
const RANGES = [["reward", "Reward"], ["advantage", "Advantage"], ["tokens", "Tokens"], ["searches", "Searches"], ["step", "Step"]];
const SHORT = 12; // names of a kind that are shown at once

function drawFilters(root, facets, query, change) {
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

// --- The list of episodes that pass the filter. ---

const ORDERS = [["new", "newest"], ["old", "oldest"], ["-reward", "best rewarded"], ["reward", "worst rewarded"], ["-advantage", "largest advantage"],
  ["advantage", "smallest advantage"], ["-tokens", "longest"], ["tokens", "shortest"], ["question", "by question"]];

const PAGE = 100; // episodes at once

function drawList(root, found, chosen, marked, order, { choose, order: sort, page }) {
  const last = Math.min(found.offset + found.rows.length, found.total);
  const top = root.querySelector(".rows")?.scrollTop ?? 0;
  fill(root,
    h("div", { class: "head" },
      h("span", { class: "num", id: "total", title: `${found.ms} ms` }, found.total ? `${thousands(found.offset + 1)}–${thousands(last)} of ${thousands(found.total)}` : "none"),
      found.offset ? h("button", { onclick: () => page(Math.max(found.offset - PAGE, 0)), title: "previous page (p)" }, "‹") : null,
      last < found.total ? h("button", { onclick: () => page(found.offset + PAGE), title: "next page (n)" }, "›") : null,
      h("select", { "aria-label": "order", onchange: (event) => sort(event.target.value) },
        ORDERS.map(([value, text]) => h("option", { value, selected: value === order }, text)))),
    h("div", { class: "rows" }, found.rows.length ? found.rows.map((row) => item(row, row.key === chosen, marked.includes(row.key), choose))
      : h("p", { class: "empty" }, "no episode passes the filter")));
  const rows = root.querySelector(".rows");
  rows.scrollTop = top;
  rows.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
}

function item(row, chosen, marked, choose) {
  return h("a", { class: `row${chosen ? " chosen" : ""}${marked ? " marked" : ""}`, "data-key": row.key, onclick: () => choose(row.key) },
    outcome(row.correct),
    h("span", { class: "question" }, row.question),
    h("span", { class: "reward num" }, row.reward === null ? "" : number(row.reward)),
    h("span", { class: "answer" }, row.answer === null ? h("i", {}, "no answer") : row.answer),
    h("span", { class: "where faint" }, where(row), row.advantage === null ? "" : ` · adv ${signed(row.advantage)}`,
      row.kbs.map(kbDot), row.forked ? " · forked" : "",
      row.failures.length ? h("span", { class: "bad" }, ` ${row.failures.join(", ")}`) : null));
}
