// Talking with a policy that searches: a reply is drawn anew with every line that the server sends of it.

import { get } from "./api.js";
import { conversation } from "./conversation.js";
import { byId, fill, h, kbLabel } from "./dom.js";

let earlier = []; // questions with their answers
let images = []; // data: URIs of the pictures that the questions are about
let under = null; // the AbortController of the reply that is being written

async function begin() {
  const about = await get("/api/about");
  document.title = about.name;
  const remembers = about.earlier ? `the last ${about.earlier} questions stand before a new one` : "every question stands by itself";
  fill(byId("top"), h("b", {}, about.name),
    h("div", { class: "kbs" }, about.knowledge_bases.map((kb) => h("span", { title: `${kb.kind}${kb.passages === null ? "" : `, ${kb.passages} passages`}` }, kbLabel(kb.name)))),
    h("span", { class: "faint" }, remembers));
  byId("add").hidden = !about.pictures;
}

async function* lines(reply) {
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n");
    text = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

async function ask() {
  const question = byId("question").value.trim();
  if (!question || under) return;
  byId("question").value = "";
  const article = h("article", {}, h("p", { class: "asked" }, question));
  byId("log").append(article);
  const mine = under = new AbortController();
  buttons();
  let answer = null;
  try {
    const reply = await fetch("/api/ask", { method: "POST", signal: mine.signal, headers: { "content-type": "application/json" },
      body: JSON.stringify({ question, images, earlier }) });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const line of lines(reply)) {
      if (line.error) throw new Error(line.error);
      if (!line.going) answer = line.record.prediction;
      draw(article, line);
    }
    if (mine === under && answer !== null) earlier.push([question, answer]);
  } catch (error) {
    article.append(mine.signal.aborted ? h("p", { class: "faint" }, "stopped") : h("p", { class: "bad" }, error.message));
  }
  if (mine === under) under = null;
  buttons();
}

function draw(article, line) {
  const log = byId("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const now = line.searching ? h("p", { class: "search writing" }, kbLabel(line.searching.tool), line.searching.query || "by the picture", " …")
    : line.writing ? h("div", { class: "say policy" }, h("pre", { class: "writing" }, line.writing)) : null;
  const cut = !line.going && line.record.truncated && !line.record.turns.length;
  fill(article, conversation(line, { going: line.going }), now,
    cut ? h("p", { class: "bad" }, "The question and what was said before it do not fit: begin a new conversation.") : null,
    line.sources?.length ? h("ol", { class: "sources faint" }, line.sources.map((one) => h("li", { title: one.text }, kbLabel(one.knowledge_base),
      one.title ? `${one.title}, ` : "", /^https?:/.test(one.url) ? h("a", { href: one.url, rel: "noreferrer", target: "_blank" }, one.url) : one.id))) : null);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function buttons() {
  byId("stop").hidden = !under;
  byId("send").disabled = Boolean(under);
}

function drawPictures() {
  fill(byId("pictures"), images.map((uri, i) => h("img", { class: "thumb", src: uri, alt: "picture", title: "click to put away",
    onclick: () => { images = images.filter((_, j) => j !== i); drawPictures(); } })));
}

const read = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

byId("file").onchange = async (event) => {
  images = [...images, ...await Promise.all([...event.target.files].map(read))];
  event.target.value = "";
  drawPictures();
};
byId("ask").onsubmit = (event) => { event.preventDefault(); ask(); };
byId("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  else if (event.key === "Escape") under?.abort();
};
byId("stop").onclick = () => under?.abort();
byId("new").onclick = () => {
  under?.abort();
  under = null;
  [earlier, images] = [[], []];
  fill(byId("log"));
  drawPictures();
  buttons();
};
begin().catch((error) => fill(byId("log"), h("p", { class: "bad" }, `The server does not answer: ${error.message}`)));
