// Episodes beside each other: a group's attempts in columns, the same question over steps and runs in a table, the branches of a
// forked attempt as a tree, and any that were marked.

import { address, episode, go, many } from "./api.js";
import { conversation } from "./conversation.js";
import { colour, fill, h, kbDot, number, outcome, signed, where } from "./dom.js";

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

// --- The branches of a forked attempt as a tree: a node for each decision, a leaf for each episode. ---

export function forkTree(told, version) {
  const root = h("div", { class: "tree" }, h("p", { class: "faint" }, "…"));
  Promise.all(told.forks.map((brief) => episode(brief.key, version))).then((all) => {
    root.replaceChildren(h("p", { class: "faint" }, "At each decision every branch was taken. The number beside a branch is the probability that the policy gives it."),
      h("p", { class: "asked" }, told.record.question), drawn(grown(all), told.key));
  }, (error) => root.replaceChildren(h("p", { class: "bad" }, error.message)));
  return root;
}

// {branches: name -> {branch, node}, leaves: [told]}
function grown(all) {
  const top = { branches: new Map(), leaves: [] };
  for (const told of all) {
    let node = top;
    for (const branch of told.record.branches) {
      const name = `${branch.turn} ${branch.tool}`;
      if (!node.branches.has(name)) node.branches.set(name, { branch, node: { branches: new Map(), leaves: [] } });
      node = node.branches.get(name).node;
    }
    node.leaves.push(told);
  }
  return top;
}

function drawn(node, current) {
  return h("ul", {},
    node.leaves.map((told) => h("li", { class: told.key === current ? "leaf current" : "leaf" }, outcome(told.brief.correct),
      h("a", { href: address("episodes", [["question", told.brief.id], ["key", told.key], ["tab", "forks"]]) }, told.record.prediction ?? "no answer"),
      h("span", { class: "num faint" }, ` reward ${number(told.brief.reward)}`), h("span", { class: "faint" }, ` · ${steps(told)}`))),
    [...node.branches.values()].map(({ branch, node: next }) => h("li", {},
      h("span", { class: "branch" }, h("b", { style: { color: colour("kb", branch.tool) } }, branch.tool), h("span", { class: "num" }, ` ${number(Math.exp(branch.logprob))}`),
        h("span", { class: "faint" }, ` turn ${branch.turn + 1} · mean reward ${number(mean(next))}`)), drawn(next, current))));
}

function rewards(node) {
  return [...node.leaves.map((told) => told.brief.reward), ...[...node.branches.values()].flatMap(({ node: next }) => rewards(next))].filter((value) => value !== null);
}

const mean = (node) => { const all = rewards(node); return all.length ? all.reduce((sum, value) => sum + value, 0) / all.length : null; };
const steps = (told) => told.record.turns.map((turn) => turn.action?.tool || turn.action?.kind || "written").join(" → ");

// --- Any episodes side by side: those that the address names, or those that were marked. ---

export class Compare {
  constructor(root) {
    this.root = root;
  }

  async open(query, state) {
    let keys = many(query, "key");
    if (!keys.length) keys = JSON.parse(sessionStorage.getItem("marked") || "[]");
    if (!keys.length) {
      fill(this.root, h("p", { class: "empty" }, "Mark episodes with x in the list; c shows them side by side."));
      return;
    }
    const all = await Promise.allSettled(keys.map((key) => episode(key, state.version)));
    const told = all.filter((one) => one.status === "fulfilled").map((one) => one.value.brief);
    const gone = all.length - told.length;
    fill(this.root, h("div", { class: "compare" },
      h("div", { class: "tools" }, h("b", {}, `${told.length} episodes`), gone ? h("span", { class: "bad" }, `${gone} are gone`) : null,
        h("button", { onclick: () => { sessionStorage.removeItem("marked"); go("episodes"); } }, "unmark all")),
      questions(told), columns(told, state.version)));
  }
}

function questions(told) {
  const asked = [...new Set(told.map((brief) => brief.question))];
  return asked.length === 1 ? h("p", { class: "asked" }, asked[0]) : null;
}
