// The list of episodes that pass the filter.

import { colour } from "./colours.js";
import { fill, h } from "./dom.js";
import { number, signed, thousands } from "./format.js";

const ORDERS = [["new", "newest"], ["old", "oldest"], ["-reward", "best rewarded"], ["reward", "worst rewarded"], ["-advantage", "largest advantage"],
  ["advantage", "smallest advantage"], ["-tokens", "longest"], ["tokens", "shortest"], ["question", "by question"]];

export const PAGE = 100; // episodes at once

export function drawList(root, found, chosen, marked, order, { choose, order: sort, page }) {
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

export const where = (row) => [row.source === "training" ? `step ${row.step}` : row.source, row.sample ? `#${row.sample}` : ""].filter(Boolean).join(" ");

export const kbDot = (name) => h("span", { class: "kb" }, h("i", { style: { background: colour("kb", name) } }), name);

export const outcome = (correct) => h("i", { class: `outcome ${correct === 1 ? "right" : correct === 0 ? "wrong" : "open"}`,
  title: correct === 1 ? "right" : correct === 0 ? "wrong" : "no gold answer" }, correct === 1 ? "✓" : correct === 0 ? "✗" : "·");
