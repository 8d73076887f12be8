// Keys and what they do.

import { byId, fill, h } from "./dom.js";

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

export const FIELDS = "input:not([type=checkbox]), select, textarea"; // whose keys are their own

export const typing = (event) => {
  const into = event.target.matches?.(FIELDS) ?? false;
  if (into && event.key === "Escape") event.target.blur();
  return into;
};

export function showHelp() {
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
