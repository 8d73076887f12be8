// The pane of one episode, and its tabs.

import { episode } from "./api.js";
import { conversation, pictures } from "./conversation.js";
import { byId, fill, h, number, outcome, signed, tipOn, where } from "./dom.js";
import { columns, elsewhere, forkTree } from "./relatives.js";

const TABS = [
  { name: "conversation", title: () => "Conversation", draw: (told, pane) => conversation(told, { raw: pane.raw }) },
  { name: "tokens", title: () => "Tokens", has: (told) => told.record.tokens?.length, draw: tokens },
  { name: "pictures", title: (told) => `Pictures ${told.looks.length}`, has: (told) => told.looks.length, draw: pictures },
  { name: "group", title: (told) => `Group ${told.siblings.length + 1}`, has: (told) => told.siblings.length,
    draw: (told, pane) => columns([told.brief, ...told.siblings].sort((a, b) => a.sample - b.sample), pane.version, told.key) },
  { name: "forks", title: (told) => `Forks ${told.forks.length}`, has: (told) => told.forks.length, draw: (told, pane) => forkTree(told, pane.version) },
  { name: "elsewhere", title: (told) => `Same question ${told.elsewhere_count}`, has: (told) => told.elsewhere_count, draw: elsewhere },
];

export class EpisodePane {
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.raw = false;
    this.wanted = null; // the key of the episode that is to be shown
    this.told = null; // what is shown; null: nothing, or why there is nothing
  }

  empty() {
    this.wanted = this.told = null;
    fill(this.root, h("p", { class: "empty" }, "no episode is chosen"));
  }

  async open(key, version, tab) {
    this.tab = tab || "conversation";
    this.version = version;
    this.wanted = key;
    let told;
    try {
      told = await episode(key, version);
    } catch (error) {
      if (this.wanted !== key) return;
      this.told = null;
      fill(this.root, h("p", { class: "empty bad" }, error.message));
      return;
    }
    if (this.wanted !== key) return; // another was chosen meanwhile
    const changed = this.told?.key !== key || related(told) !== related(this.told) || this.drawn !== this.tab;
    this.told = told;
    if (changed) this.draw();
  }

  draw() {
    const { told } = this;
    const tabs = TABS.filter((tab) => !tab.has || tab.has(told));
    const current = tabs.find((tab) => tab.name === this.tab) ?? tabs[0];
    this.drawn = this.tab;
    byId("tip").hidden = true; // what it was of is taken away
    const { brief } = told;
    fill(this.root,
      h("div", { class: "about" },
        h("div", { class: "title" }, outcome(brief.correct), h("span", {}, `${brief.run} · ${where(brief)}`),
          brief.reward === null ? null : h("span", { class: "faint num" }, `reward ${number(brief.reward)}`),
          brief.advantage === null ? null : h("span", { class: "faint num" }, `advantage ${signed(brief.advantage)}`),
          brief.trained === 0 ? h("span", { class: "faint" }, "not learnt from") : null,
          h("span", { class: "faint num" }, `${brief.tokens} tokens`),
          h("span", { class: "faint path", title: told.file }, brief.id)),
        h("nav", { class: "tabs" }, tabs.map((tab, i) => h("button", { class: tab === current ? "here" : "", title: `key ${i + 1}`,
          onclick: () => this.show(tab.name) }, tab.title(told))),
          h("button", { class: `raw${this.raw ? " here" : ""}`, title: "texts as they were written (r)", onclick: () => this.toggle() }, "as written"))),
      h("div", { class: `body ${current.name}` }, current.draw(told, this)));
    this.root.scrollTop = 0;
  }

  show(tab) {
    this.tab = tab;
    this.actions.tab(tab);
    this.draw();
  }

  toggle() {
    this.raw = !this.raw;
    this.draw();
  }

  key(event) {
    if (!this.told) return false;
    const tabs = TABS.filter((tab) => !tab.has || tab.has(this.told));
    const number = Number(event.key);
    if (number >= 1 && number <= tabs.length) this.show(tabs[number - 1].name);
    else if (event.key === "r") this.toggle();
    else return false;
    return true;
  }
}

const related = (told) => `${told.siblings.length} ${told.forks.length} ${told.elsewhere_count}`;

// --- Every token as the engine fed or sampled it, shaded by its log-probability, advantage or mask. ---

const SHADES = {
  logprob: { title: "log-probability", legend: "the darker, the less likely the policy found what it sampled" },
  advantage: { title: "advantage", legend: "green: made more likely; red: less likely" },
  mask: { title: "mask", legend: "shaded: sampled, and so trained on; the rest was fed" },
};
let chosen = localStorage.getItem("shade") || "logprob";

function tokens(told) {
  const root = h("div", { class: "tokens" });
  const draw = () => {
    const buttons = Object.entries(SHADES).map(([name, { title }]) => h("button", { class: name === chosen ? "here" : "", onclick: () => {
      chosen = name;
      localStorage.setItem("shade", name);
      draw();
    } }, title));
    fill(root, h("div", { class: "tools" }, buttons, h("span", { class: "faint" }, SHADES[chosen].legend)),
      told.record.tokens.map((sequence, i) => [
        told.record.tokens.length > 1 ? h("h2", {}, `sequence ${i + 1}`) : null,
        h("p", { class: "faint num" }, about(sequence)), text(sequence)]));
  };
  draw();
  return root;
}

function about(sequence) {
  const sampled = sequence.logprob.filter((_, i) => sequence.sampled[i]);
  const mean = sampled.reduce((sum, value) => sum + value, 0) / Math.max(sampled.length, 1);
  return `${sequence.text.length} tokens, ${sampled.length} sampled, mean log-probability ${number(mean)}`;
}

function text(sequence) {
  const most = Math.max(...sequence.advantage.map(Math.abs), 1e-9);
  const pieces = [];
  for (let i = 0; i < sequence.text.length; i += 1) {
    let count = 1;
    while (!sequence.sampled[i] && sequence.text[i + count] === sequence.text[i] && !sequence.sampled[i + count]) count += 1;
    const piece = sequence.text[i];
    const span = h("span", { class: sequence.sampled[i] ? "sampled" : "fed", "data-i": i }, piece.replaceAll("\n", "↵\n") || "·", count > 3 ? h("small", {}, `×${count}`) : null);
    if (sequence.sampled[i]) span.style.background = shade(sequence, i, most);
    pieces.push(span);
    if (count > 3) i += count - 1;
  }
  const body = h("pre", { class: "stream" }, pieces);
  tipOn(body, (target) => {
    const i = Number(target.dataset?.i ?? NaN);
    if (Number.isNaN(i)) return "";
    const lines = [`token ${i}  ${JSON.stringify(sequence.text[i])}`];
    if (!sequence.sampled[i]) return [...lines, "fed, not trained on"].join("\n");
    const p = Math.exp(sequence.logprob[i]);
    return [...lines, `log-prob   ${number(sequence.logprob[i])}  (p ${number(p)})`, `advantage  ${signed(sequence.advantage[i])}`].join("\n");
  });
  return body;
}

function shade(sequence, i, most) {
  if (chosen === "mask") return "rgb(var(--shade) / 0.22)";
  if (chosen === "logprob") return `rgb(217 130 43 / ${(0.75 * (1 - Math.exp(sequence.logprob[i]))).toFixed(3)})`;
  const share = Math.abs(sequence.advantage[i]) / most;
  return `rgb(${sequence.advantage[i] >= 0 ? "58 157 122" : "194 80 74"} / ${(0.6 * share).toFixed(3)})`;
}
