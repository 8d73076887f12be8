// Episodes beside each other: a group's attempts in columns, the same question over steps and runs in a table.

import { episode } from "./api.js";
import { address } from "./address.js";
import { conversation } from "./conversation.js";
import { h } from "./dom.js";
import { number, signed } from "./format.js";
import { kbDot, outcome, where } from "./list.js";

const MOST = 12; // columns

export function columns(briefs, version, current = null) {
  const shown = briefs.slice(0, MOST);
  return [
    briefs.length > MOST ? h("p", { class: "faint" }, `the first ${MOST} of ${briefs.length}`) : null,
    h("div", { class: "columns" }, shown.map((brief) => {
      const body = h("div", {}, h("p", { class: "faint" }, "…"));
      episode(brief.key, version).then((told) => body.replaceChildren(conversation(told, { short: true })),
        (error) => body.replaceChildren(h("p", { class: "bad" }, error.message)));
      return h("article", { class: brief.key === current ? "current" : "" },
        h("header", {}, outcome(brief.correct), link(brief, `${brief.run} · ${where(brief)}${brief.sample ? "" : " #0"}`),
          h("span", { class: "num faint" }, `reward ${number(brief.reward)}`, brief.advantage === null ? "" : ` · adv ${signed(brief.advantage)}`)), body);
    })),
  ];
}

export function elsewhere(told, pane) {
  const briefs = [told.brief, ...told.elsewhere].sort((a, b) => a.run.localeCompare(b.run) || order(a) - order(b) || a.source.localeCompare(b.source) || a.sample - b.sample);
  const keys = briefs.slice(0, MOST).map((brief) => ["key", brief.key]);
  return [
    h("p", {}, h("a", { href: address("compare", keys) }, `side by side${briefs.length > MOST ? ` (the first ${MOST})` : ""}`),
      h("a", { class: "more", href: address("episodes", [["question", told.brief.id]]) }, "in the list"),
      told.elsewhere_count > told.elsewhere.length ? h("span", { class: "faint" }, ` ${told.elsewhere.length} of ${told.elsewhere_count} are shown`) : null),
    h("table", { class: "elsewhere" },
      h("thead", {}, h("tr", {}, ["", "run", "from", "answer", "reward", "searches", "tokens"].map((name) => h("th", {}, name)))),
      h("tbody", {}, briefs.map((brief) => h("tr", { class: brief.key === told.key ? "current" : "" },
        h("td", {}, outcome(brief.correct)), h("td", {}, brief.run), h("td", {}, link(brief, where(brief))), h("td", {}, brief.answer ?? h("i", { class: "faint" }, "none")),
        h("td", { class: "num" }, number(brief.reward)), h("td", {}, brief.kbs.length ? brief.kbs.map(kbDot) : h("span", { class: "faint" }, "none")),
        h("td", { class: "num" }, brief.tokens))))),
  ];
}

const order = (brief) => (brief.source === "training" ? brief.step : 1e9);
const link = (brief, text) => h("a", { href: address("episodes", [["question", brief.id], ["key", brief.key]]) }, text);
