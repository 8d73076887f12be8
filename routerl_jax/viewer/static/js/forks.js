// The ways of a forked attempt as a tree: a node for each decision, a leaf for each episode.

import { episode } from "./api.js";
import { address } from "./address.js";
import { colour } from "./colours.js";
import { h } from "./dom.js";
import { number } from "./format.js";
import { outcome } from "./list.js";

export function forkTree(told, version) {
  const root = h("div", { class: "tree" }, h("p", { class: "faint" }, "…"));
  Promise.all(told.forks.map((brief) => episode(brief.key, version))).then((all) => {
    root.replaceChildren(h("p", { class: "faint" }, "At each decision every way was taken. A number at a way: the probability that the policy gives it."),
      h("p", { class: "asked" }, told.record.question), branch(grown(all), told.key));
  }, (error) => root.replaceChildren(h("p", { class: "bad" }, error.message)));
  return root;
}

// {ways: name -> {branch, node}, leaves: [told]}
function grown(all) {
  const top = { ways: new Map(), leaves: [] };
  for (const told of all) {
    let node = top;
    for (const way of told.record.branches) {
      const name = `${way.turn} ${way.tool}`;
      if (!node.ways.has(name)) node.ways.set(name, { way, node: { ways: new Map(), leaves: [] } });
      node = node.ways.get(name).node;
    }
    node.leaves.push(told);
  }
  return top;
}

function branch(node, current) {
  return h("ul", {},
    node.leaves.map((told) => h("li", { class: told.key === current ? "leaf current" : "leaf" }, outcome(told.brief.correct),
      h("a", { href: address("episodes", [["question", told.brief.id], ["key", told.key], ["tab", "forks"]]) }, told.record.prediction ?? "no answer"),
      h("span", { class: "num faint" }, ` reward ${number(told.brief.reward)}`), h("span", { class: "faint" }, ` · ${steps(told)}`))),
    [...node.ways.values()].map(({ way, node: next }) => h("li", {},
      h("span", { class: "way" }, h("b", { style: { color: colour("kb", way.tool) } }, way.tool), h("span", { class: "num" }, ` ${number(Math.exp(way.logprob))}`),
        h("span", { class: "faint" }, ` turn ${way.turn + 1} · mean reward ${number(mean(next))}`)), branch(next, current))));
}

function rewards(node) {
  return [...node.leaves.map((told) => told.brief.reward), ...[...node.ways.values()].flatMap(({ node: next }) => rewards(next))].filter((value) => value !== null);
}

const mean = (node) => { const all = rewards(node); return all.length ? all.reduce((sum, value) => sum + value, 0) / all.length : null; };
const steps = (told) => told.record.turns.map((turn) => turn.action?.tool || turn.action?.kind || "written").join(" → ");
