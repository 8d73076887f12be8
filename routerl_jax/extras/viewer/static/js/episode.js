// The pane of one episode, and its tabs.

import { episode } from "./api.js";
import { byId, fill, h } from "./dom.js";
import { signed, number } from "./format.js";
import { conversation } from "./conversation.js";
import { forkTree } from "./forks.js";
import { outcome, where } from "./list.js";
import { pictures } from "./pictures.js";
import { columns, elsewhere } from "./relatives.js";
import { tokens } from "./tokens.js";

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
