// The branches of a forked attempt as a tree: a node for each decision, a leaf for each episode.

import { episode } from "./api.js";
import { address } from "./address.js";
import { colour } from "./colours.js";
import { h } from "./dom.js";
import { number } from "./format.js";
import { outcome } from "./list.js";

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
