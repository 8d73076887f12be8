// The explorer: filters, the list of episodes that pass, and the episode that is chosen.

import { get } from "./api.js";
import { go, many, note, one, without } from "./address.js";
import { fill, h } from "./dom.js";
import { EpisodePane } from "./episode.js";
import { drawFilters } from "./filters.js";
import { FIELDS } from "./keys.js";
import { PAGE, drawList } from "./list.js";

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
