// The frame: which view is open, the state of the runs, keys that work everywhere.

import { get, go, here } from "./api.js";
import { byId, FIELDS, fill, h, thousands } from "./dom.js";
import { Explorer } from "./explorer.js";
import { Overview } from "./overview.js";
import { Compare } from "./relatives.js";

const PAUSE = 2000; // ms between two looks at the runs
const VIEWS = { overview: Overview, episodes: Explorer, compare: Compare };
let state = null;
let view = null;
let lost = false;

function show() {
  const { view: name, query } = here();
  const kind = VIEWS[name] || Overview;
  if (!(view instanceof kind)) {
    view?.close?.();
    view = new kind(byId("view"));
  }
  byId("tip").hidden = true;
  view.open(query, state);
  drawTop();
}

function drawTop() {
  const { view: name } = here();
  const link = (to, text) => h("a", { href: `#/${to}`, class: to === name ? "here" : "" }, text);
  const indexing = state.settled ? "" : "reading … ";
  document.title = state.runs.map((run) => run.name).slice(0, 3).join(", ");
  fill(byId("top"),
    h("nav", {}, link("overview", "Overview"), link("episodes", "Episodes"), link("compare", "Side by side")),
    h("div", { class: "runs" }, state.runs.map((run) => h("span", { class: "run", title: run.path },
      h("i", { class: `dot ${lost ? "lost" : run.state}`, title: run.state }), h("span", { class: "name" }, run.name),
      h("small", {}, run.step === null ? "" : ` ${run.step + 1}${run.steps ? `/${run.steps}` : ""}`)))),
    h("div", { class: "right" },
      lost ? h("b", { class: "bad" }, "no connection ") : null,
      h("span", { class: "faint", id: "count" }, indexing, thousands(state.episodes), " episodes"),
      state.skipped ? h("span", { class: "bad", title: "lines of .jsonl files that are no episode records" }, ` ${state.skipped} lines skipped`) : null,
      h("button", { title: "dark or light (t)", onclick: theme }, "◐"),
      h("button", { title: "keys (?)", onclick: showHelp }, "?")));
}

function theme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
  view?.restyle?.();
}

async function poll() {
  try {
    const next = await get("/api/state");
    const first = state === null;
    const before = state;
    state = next;
    lost = false;
    if (first) show();
    else {
      drawTop();
      await view.refresh?.(state, before);
    }
  } catch (error) {
    lost = true;
    if (state) drawTop();
    else fill(byId("view"), h("p", { class: "empty" }, `The server does not answer: ${error.message}`));
  }
  setTimeout(poll, PAUSE);
}

const KEYS = [
  ["j  k", "next, previous episode"],
  ["/", "search words"],
  ["1 … 6", "tabs of an episode"],
  ["r", "texts as they were written, and back"],
  ["x", "mark an episode, or unmark it"],
  ["c", "marked episodes side by side"],
  ["n  p", "next, previous page of the list"],
  ["Esc", "clear the filter"],
  ["g  e", "overview, episodes"],
  ["t", "dark or light"],
];

const typing = (event) => {
  const into = event.target.matches?.(FIELDS) ?? false;
  if (into && event.key === "Escape") event.target.blur();
  return into;
};

function showHelp() {
  const dialog = byId("help");
  if (dialog.open) {
    dialog.close();
    return;
  }
  fill(dialog, h("h2", {}, "Keys"),
    h("table", {}, KEYS.map(([key, does]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, does)))));
  dialog.onclick = () => dialog.close();
  dialog.showModal();
}

addEventListener("hashchange", () => state && show());
addEventListener("keydown", (event) => {
  if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (byId("help").open && event.key !== "?") return; // Escape closes it; the page behind it is not meant
  if (event.key === "t") theme();
  else if (event.key === "?") showHelp();
  else if (event.key === "g") go("overview");
  else if (event.key === "e") go("episodes");
  else if (!view?.key?.(event)) return;
  event.preventDefault();
});
poll();
