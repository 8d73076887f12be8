// A trajectory as a conversation: what was asked, thought, searched, found, looked at and answered.

import { pictureUrl } from "./api.js";
import { h, kbLabel, number, signed } from "./dom.js";

// `raw`: texts as they were written. `short`: for columns side by side, without what retrieved texts say in full.
// `going`: the episode is not over, so nothing is said of its end.
export function conversation(told, { raw = false, short = false, going = false } = {}) {
  const { record } = told;
  const branches = new Map((record.branches ?? []).map((branch) => [branch.turn, branch]));
  const last = record.turns.length - 1;
  return h("div", { class: `talk${short ? " short" : ""}` },
    h("div", { class: "say user" },
      raw ? h("pre", {}, record.prompt) : h("p", { class: "asked" }, record.question),
      h("div", { class: "thumbs" }, record.images.filter((n) => n !== null).map((n) => thumb(told, n)))),
    record.turns.map((turn, i) => [written(told, turn, branches.get(i), i === last && !going, raw), replied(told, turn, raw, short)]),
    going ? null : ending(record));
}

function written(told, turn, branch, last, raw) {
  const action = turn.action ?? { kind: "written", thought: "" };
  const parts = [];
  if (branch) {
    parts.push(h("p", { class: "fork", title: "This branch was taken for the policy" }, `fork: ${branch.tool} was chosen for the policy, which gives it probability ${number(Math.exp(branch.logprob))}`));
  }
  if (raw || action.kind === "written" || action.kind === "invalid") {
    parts.push(h("pre", {}, turn.forced ? h("span", { class: "forced", title: "fed to force this form" }, turn.forced) : null, turn.text));
  } else {
    if (turn.forced) parts.push(h("p", { class: "forced" }, "the answer was forced: the budget was spent"));
    if (action.thought) parts.push(h("p", { class: "thought" }, action.thought));
    if (action.kind === "search") parts.push(h("p", { class: "search" }, kbLabel(action.tool), action.query || h("i", { class: "faint" }, "by the picture")));
    if (action.kind === "region") parts.push(h("p", { class: "search" }, h("b", { class: "label look" }, "looks at"), box(action.box)));
    if (action.kind === "refusal") parts.push(h("p", {}, turn.text.trim()));
    if (action.kind === "answer") parts.push(h("p", { class: last ? "answer" : "" }, last ? action.answer : ["finds: ", action.answer]));
  }
  if (action.error) parts.push(h("p", { class: "bad" }, action.kind === "invalid" ? `invalid: ${action.error}` : action.error));
  else if (!turn.well_formed) parts.push(h("p", { class: "note" }, "not well formed"));
  if (turn.stop_reason === "length") parts.push(h("p", { class: "note" }, "cut off at the limit of tokens"));
  if (Object.keys(turn.rewards ?? {}).length) parts.push(h("p", { class: "note num" }, terms(turn.rewards)));
  const measured = Object.entries(turn.info ?? {}).map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`);
  if (measured.length) parts.push(h("p", { class: "note num", title: "what the agent measured at this turn" }, `measured: ${measured.join("   ")}`));
  return h("div", { class: "say policy" }, parts);
}

function replied(told, turn, raw, short) {
  const ids = new Set((turn.shown ?? []).map((item) => item.passage).filter(Boolean)); // where the agent says what it showed
  const parts = turn.calls.map((call) => found(told, call, short, ids));
  if (raw && turn.observation) parts.splice(0, parts.length, h("pre", {}, turn.observation));
  const shown = (turn.shown ?? []).filter((item) => item.digest || item.error);
  const inPassages = new Set(turn.calls.flatMap((call) => call.passages.map((passage) => passage.image)));
  const others = shown.filter((item) => item.error || item.box.length || !(inPassages.has(item.image) || told.record.images.includes(item.image)));
  if (others.length) parts.push(h("div", { class: "shown" }, others.map((item) => seen(told, item))));
  return parts.length ? h("div", { class: "say world" }, parts) : null;
}

function found(told, call, short, shown) {
  const head = h("div", { class: "from faint" }, kbLabel(call.tool), call.query && h("span", {}, `“${call.query}”`),
    h("span", { class: "num" }, call.seconds ? ` ${number(call.seconds * 1000, 2)} ms` : "", call.cost ? ` · cost ${number(call.cost)}` : ""));
  if (call.error !== null) return h("div", { class: "call" }, head, h("p", { class: "bad" }, call.error));
  return h("div", { class: "call" }, head, walk(call), call.passages.length ? call.passages.map((passage) => passageOf(told, passage, short, shown.size > 0 && !shown.has(passage.id))) : h("p", { class: "faint" }, "nothing found"));
}

// Where a walk over a graph began, and what it passed oftenest.
function walk(call) {
  if (!call.facts?.length) return null;
  const began = h("p", { class: "walk faint", title: "facts nearest to the query, best first: from their phrases the walk over the graph began" },
    "walks from ", call.facts.map((fact) => h("span", {}, fact)));
  if (!call.nodes?.length) return began;
  return [began, h("p", { class: "walk faint", title: "phrases at which the walk over the graph was oftenest, most first" },
    "through ", call.nodes.map((node) => h("span", {}, node)))];
}

function passageOf(told, passage, short, unseen) {
  const text = passage.text.trim();
  const title = passage.title && !text.startsWith(passage.title) ? h("b", {}, passage.title, " ") : null;
  const body = h("p", { class: "text" }, title, text);
  if (text.length > (short ? 120 : 420)) {
    body.classList.add("folded");
    body.title = "click to unfold";
    body.onclick = () => { if (!getSelection().toString()) body.classList.toggle("folded"); };
  }
  return h("div", { class: `passage${unseen ? " unseen" : ""}`, title: unseen ? "found, but not shown to the policy" : null },
    h("span", { class: "score num faint", title: `score of ${passage.id}` }, number(passage.score)),
    passage.image === null || passage.image === undefined ? null : thumb(told, passage.image), body);
}

function seen(told, item) {
  if (item.error) return h("p", { class: "bad" }, `a picture${item.passage ? ` of ${item.passage}` : ""} could not be shown: ${item.error}`);
  if (!item.box.length) return thumb(told, item.image, true);
  const look = told.looks.find((one) => one.crops.some((crop) => crop.image === item.image && same(crop.box, item.box)));
  const crop = look?.crops.find((one) => one.image === item.image && same(one.box, item.box));
  return h("figure", { class: "crop" }, look ? pageWithBoxes(told, { ...look, crops: [crop] }) : null, thumb(told, item.image, true));
}

function ending(record) {
  const right = record.golden_answers?.length ? h("p", { class: "gold faint" }, "gold: ", record.golden_answers.join(" / ")) : null;
  const { verdict, usage, failure } = record;
  return h("div", { class: "ending" },
    record.prediction === null ? h("p", { class: "bad" }, "no answer") : null,
    failure ? h("p", { class: "bad" }, `the endpoint failed: ${failure.kind}. ${failure.message}`) : null,
    record.truncated ? h("p", { class: "bad" }, "truncated: a token limit ended the episode") : null,
    right,
    verdict ? h("p", { class: "faint" }, `judge: ${verdict.kind}. ${verdict.said}`) : null,
    Object.keys(record.rewards ?? {}).length ? h("p", { class: "faint num" }, "rewards: ", terms(record.rewards)) : null,
    usage ? h("p", { class: "faint num" }, `${usage.replies} replies, ${usage.prompt_tokens} tokens read, ${usage.tokens} written${usage.cost ? `, cost ${number(usage.cost)}` : ""}`) : null);
}

const terms = (rewards) => Object.entries(rewards).map(([name, value]) => `${name} ${signed(value)}`).join("   ");
const box = (sides) => `(${sides.map((side) => number(side, 4)).join(", ")})`;
const same = (one, other) => one.length === other.length && one.every((side, i) => side === other[i]);

// --- Pictures of a record: small ones that grow when clicked, and pages with boxes where the policy looked closer. ---

const BOXES = ["#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf"];

function thumb(told, n, large = false) {
  const image = h("img", { class: large ? "thumb large" : "thumb", src: pictureUrl(told, n), title: told.pictures[n] ?? "", loading: "lazy", alt: "picture" });
  image.onclick = () => image.classList.toggle("grown");
  image.onerror = () => image.replaceWith(h("span", { class: "missing", title: told.pictures[n] }, "picture is gone"));
  return image;
}

// Boxes are in pixels of the raw picture, so they are placed in shares of its size once that is known.
function pageWithBoxes(told, look) {
  const image = h("img", { src: pictureUrl(told, look.image), alt: "page", title: told.pictures[look.image] ?? "" });
  const page = h("div", { class: "page" }, image);
  image.onload = () => {
    const { naturalWidth: wide, naturalHeight: high } = image;
    for (const crop of look.crops) {
      const [left, top, right, bottom] = crop.box;
      const colour = BOXES[(crop.number + BOXES.length - 2) % BOXES.length];
      page.append(h("div", { class: "box", title: `(${crop.box.join(", ")})`, style: {
        left: `${100 * left / wide}%`, top: `${100 * top / high}%`, width: `${100 * (right - left) / wide}%`, height: `${100 * (bottom - top) / high}%`, "border-color": colour } },
      h("span", { style: { background: colour } }, crop.number)));
    }
  };
  image.onerror = () => page.replaceChildren(h("span", { class: "missing", title: told.pictures[look.image] }, "picture is gone"));
  return page;
}

export function pictures(told) {
  return told.looks.map((look) => h("figure", { class: "look" },
    h("figcaption", { class: "faint" }, look.number === "question" ? "the question's picture" : `picture ${look.number}`),
    h("div", { class: "pair" }, pageWithBoxes(told, look),
      h("div", {}, look.crops.map((crop) => h("div", {}, h("span", { class: "faint" }, crop.number, " "), thumb(told, crop.image, true)))))));
}
