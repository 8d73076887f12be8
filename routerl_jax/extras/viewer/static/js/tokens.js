// Every token as the engine fed or sampled it, shaded by its log-probability, advantage or mask.

import { fill, h } from "./dom.js";
import { number, signed } from "./format.js";
import { tipOn } from "./tip.js";

const SHADES = {
  logprob: { title: "log-probability", legend: "the darker, the less likely the policy found what it sampled" },
  advantage: { title: "advantage", legend: "green: made more likely; red: less likely" },
  mask: { title: "mask", legend: "shaded: sampled, and so trained on; the rest was fed" },
};
let chosen = localStorage.getItem("shade") || "logprob";

export function tokens(told) {
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
