// Any episodes side by side: those that the address names, or those that were marked.

import { episode } from "./api.js";
import { go, many } from "./address.js";
import { fill, h } from "./dom.js";
import { columns } from "./relatives.js";

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
