// The overview: how far the runs are, what is wrong, and their curves.

import { get } from "./api.js";
import { Charts } from "./charts.js";
import { breakable, duration, fill, h, number, svg } from "./dom.js";

const DRAWN = 3000; // ms between two looks at health and metrics, at least

export class Overview {
  constructor(root) {
    this.metrics = new Map(); // of each run: {mark, count, steps, stages, values}
    this.cards = h("section", { class: "cards" });
    this.health = h("section", { class: "health" });
    this.curves = h("section", { class: "curves" });
    this.charts = new Charts(this.curves);
    fill(root, h("div", { class: "overview" }, this.cards, this.health, this.curves));
    this.known = "";
  }

  open(_, state) {
    this.refresh(state);
  }

  async refresh(state) {
    fill(this.cards, state.runs.map(card));
    const now = state.runs.map((run) => `${run.name}:${run.rows}`).join();
    if (now === this.known || this.busy) return;
    this.busy = true;
    try {
      await Promise.all(state.runs.map((run) => this.fetch(run.name)));
      if (this.closed) return;
      this.charts.draw(state.runs.filter((run) => run.rows).map((run) => ({ name: run.name, ...this.metrics.get(run.name) })));
      const told = await Promise.all(state.runs.filter((run) => run.rows).map(async (run) => (
        { name: run.name, ...(await get("/api/health", [["run", run.name]])) })));
      if (!this.closed) drawHealth(this.health, told);
      this.known = now;
    } finally {
      setTimeout(() => { this.busy = false; }, DRAWN);
    }
  }

  async fetch(name) {
    const had = this.metrics.get(name) || { mark: "", count: 0, steps: [], stages: [], values: {} };
    const more = await get("/api/metrics", [["run", name], ["after", had.count], ["mark", had.mark]]);
    const kept = more.first;
    const steps = had.steps.slice(0, kept).concat(more.steps);
    const values = {};
    for (const metric of new Set([...Object.keys(had.values), ...Object.keys(more.values)])) {
      const before = had.values[metric]?.slice(0, kept) ?? new Array(kept).fill(null);
      values[metric] = before.concat(more.values[metric] ?? new Array(more.steps.length).fill(null));
    }
    this.metrics.set(name, { mark: more.mark, count: more.count, steps, stages: had.stages.slice(0, kept).concat(more.stages), values });
  }

  restyle() {
    this.charts.restyle();
  }

  close() {
    this.closed = true; // what is asked for by now comes too late
    this.charts.close();
  }
}

function card(run) {
  const done = run.step === null ? 0 : run.step + 1;
  const left = run.state === "running" && run.steps && run.seconds ? (run.steps - done) * run.seconds : null;
  const facts = [run.recipe, run.model && run.model.split("/").filter(Boolean).slice(-2).join("/"), run.seed === null || run.seed === undefined ? "" : `seed ${run.seed}`];
  const time = run.state !== "running" ? `last step ${duration(run.silent)} ago`
    : `${duration(run.silent)} since the last step${left ? `, about ${duration(left)} left` : ""}`;
  const far = run.step === null ? (run.state === "running" ? "no step yet" : "no metrics")
    : `step ${number(done)}${run.steps ? ` of ${run.steps}` : ""}${run.stage ? ` (${run.stage})` : ""}`;
  return h("article", { class: "card", title: run.path },
    h("h2", {}, h("i", { class: `dot ${run.state}` }), breakable(run.name), h("span", { class: "faint" }, ` ${run.state}`)),
    h("p", {}, facts.filter(Boolean).join(" · ")),
    run.steps ? h("div", { class: "bar" }, h("div", { style: { width: `${Math.min(100 * done / run.steps, 100)}%` } })) : null,
    h("p", { class: "faint" }, far),
    run.step === null ? null : h("p", { class: "faint" }, time));
}

// --- The health panel: alarms of config.watch, and the vitals of each run. ---

function drawHealth(root, runs) {
  const was = new Map([...root.querySelectorAll("details")].map((one) => [one.dataset.run, one.open])); // as the reader left it
  fill(root, runs.map((run) => {
    const bad = run.vitals.filter((vital) => vital.state === "bad");
    const verdict = run.alarms.length ? `${run.alarms.length} alarm${run.alarms.length > 1 ? "s" : ""}`
      : bad.length ? `${bad.length} out of bounds` : "nothing wrong";
    return h("details", { "data-run": run.name, open: was.get(run.name) ?? (runs.length === 1 || bad.length > 0 || run.alarms.length > 0) },
      h("summary", {}, h("b", {}, "Health"), runs.length > 1 ? ` of ${run.name}` : "", ": ",
        h("span", { class: bad.length || run.alarms.length ? "bad" : "good" }, verdict),
        run.patience ? h("small", { class: "faint" }, ` · config.watch stops the run after ${run.patience} bad values in a row`)
          : h("small", { class: "bad" }, " · config.watch is off (patience 0)")),
      run.alarms.map((alarm) => h("p", { class: "alarm" }, h("b", {}, `step ${alarm.step}: `), alarm.complaint)),
      h("div", { class: "vitals" }, run.vitals.map(drawVital)));
  }));
}

function drawVital(vital) {
  return h("div", { class: `vital ${vital.state}`, title: vital.meaning },
    h("span", { class: "name" }, h("i", { class: `dot ${vital.state}` }), vital.metric),
    spark(vital.recent),
    h("span", { class: "last" }, number(vital.last)),
    h("span", { class: "bound faint" }, vital.bound));
}

function spark(values) {
  const known = values.filter((value) => value !== null);
  const least = Math.min(...known), most = Math.max(...known);
  const y = (value) => (most > least ? 17 - 14 * (value - least) / (most - least) : 10);
  const x = (i) => (values.length > 1 ? 1 + 88 * i / (values.length - 1) : 45);
  const points = values.map((value, i) => (value === null ? null : `${x(i).toFixed(1)},${y(value).toFixed(1)}`)).filter(Boolean);
  return svg("svg", { class: "spark", width: 90, height: 20, viewBox: "0 0 90 20" }, svg("polyline", { points: points.join(" ") }));
}
