// Curves of metrics, with uPlot: one line per run, or per metric where one run is shown; all share one cursor.

import { colour, fill, h, number, variable } from "./dom.js";

// What is shown at first. A name that ends in / stands for all metrics below it.
const FIRST = [
  { title: "Reward", metrics: ["reward/total"] },
  { title: "Exact match", metrics: ["rollout/em", "validation/em", "canary/em"] },
  { title: "Use of knowledge bases", metrics: ["rollout/kb/"], shares: true },
  { title: "Searches per question", metrics: ["rollout/searches_per_question"] },
  { title: "Reward terms", metrics: ["reward/"], not: ["reward/total", "reward/std", "reward/kl"] },
  { title: "Searches by kind of question", metrics: ["rollout/searches/"] },
  { title: "Entropy", metrics: ["rollout/entropy"] },
  { title: "KL to the reference", metrics: ["actor/kl"] },
  { title: "Gradient norm", metrics: ["actor/grad_norm"] },
  { title: "Sequence length", metrics: ["rollout/sequence_length/mean", "rollout/sequence_length/max"] },
  { title: "Loss", metrics: ["actor/loss", "held_out/loss"] },
  { title: "Groups without signal", metrics: ["rollout/frac_reward_zero_std"] },
  { title: "Seconds per step", metrics: ["timing_s/rollout", "timing_s/update", "timing_s/reference"] },
];

// How lines of several metrics differ where the colour is the run's. A chart with more metrics becomes one chart for each.
const STROKES = [{ style: "solid", dash: [] }, { style: "dashed", dash: [6, 4] }, { style: "dotted", dash: [2, 3] }];

export class Charts {
  constructor(root) {
    this.plots = new Map();
    this.runs = [];
    this.grid = h("div", { class: "grid" });
    this.pick = h("input", { type: "search", list: "metrics", placeholder: "another metric …", "aria-label": "another metric",
      onchange: () => this.pin(this.pick.value) });
    this.names = h("datalist", { id: "metrics" });
    this.pinned = JSON.parse(localStorage.getItem("pinned") || "[]");
    fill(root, h("div", { class: "tools" }, h("b", {}, "Curves"), this.pick, this.names,
      h("span", { class: "faint" }, "drag to zoom, double-click to see all")), this.grid);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.grid);
  }

  pin(name) {
    this.pick.value = "";
    if (!this.known().includes(name)) return;
    this.pinned = this.pinned.includes(name) ? this.pinned.filter((one) => one !== name) : [...this.pinned, name];
    localStorage.setItem("pinned", JSON.stringify(this.pinned));
    this.draw(this.runs);
  }

  known() {
    return [...new Set(this.runs.flatMap((run) => Object.keys(run.values)))].sort();
  }

  draw(runs) {
    this.runs = runs;
    const known = this.known();
    fill(this.names, known.map((name) => h("option", { value: name })));
    const wanted = [...this.pinned.map((name) => ({ title: name, metrics: [name], pinned: true })), ...FIRST];
    const seen = new Set();
    for (const chart of wanted) {
      const metrics = chart.metrics.flatMap((name) => (name.endsWith("/") ? known.filter((one) => one.startsWith(name)) : known.filter((one) => one === name)))
        .filter((name) => !chart.not?.includes(name));
      if (chart.shares && metrics.length < 2) continue; // the share of a single knowledge base is always 1
      const crowded = runs.length > 1 && metrics.length > STROKES.length;
      for (const some of crowded ? metrics.map((name) => [name]) : [metrics]) {
        if (!some.length) continue;
        const title = crowded ? `${chart.title}: ${some[0].slice(below(chart))}` : chart.title;
        seen.add(title);
        this.plot({ ...chart, title }, some);
      }
    }
    for (const [title, plot] of this.plots) if (!seen.has(title)) { plot.uplot.destroy(); plot.box.remove(); this.plots.delete(title); }
  }

  plot(chart, metrics) {
    const series = this.runs.flatMap((run) => metrics.filter((metric) => run.values[metric]).map((metric) => ({ run, metric })));
    const data = aligned(series);
    const shape = series.map(({ run, metric }) => `${run.name} ${metric}`).join("\n");
    const known = this.plots.get(chart.title);
    if (known?.shape === shape) {
      known.uplot.setData(data);
      known.key.tell(known.uplot);
      return;
    }
    known?.uplot.destroy();
    const close = chart.pinned ? h("button", { title: "take away", onclick: () => this.pin(chart.title) }, "×") : null;
    const box = known?.box ?? h("figure", {});
    fill(box, h("figcaption", {}, chart.title, close));
    if (!known) this.grid.insertBefore(box, chart.pinned ? this.grid.firstChild : null);
    const key = this.key(chart, series, metrics);
    const uplot = new window.uPlot(this.options(chart, series, metrics, key), data, box);
    box.append(key.element);
    key.tell(uplot);
    this.plots.set(chart.title, { uplot, box, shape, key });
  }

  // What the lines are, with their values: at the cursor, or else the last ones.
  key(chart, series, metrics) {
    const oneRun = this.runs.length === 1;
    const short = (metric) => metric.slice(below(chart));
    const label = ({ run, metric }) => (oneRun ? short(metric) : metrics.length > 1 ? `${run.name} · ${short(metric)}` : run.name);
    const values = series.map(() => h("b", {}));
    const element = h("div", { class: "key" }, series.map((one, i) => h("span", {},
      h("i", { class: this.stroke(one, metrics).style, style: { color: this.colour(one) } }), label(one), " ", values[i])));
    const tell = (uplot) => uplot.data.slice(1).forEach((column, i) => {
      const at = uplot.cursor.idx ?? null;
      values[i].textContent = number(at === null ? column.findLast((value) => value !== null) : column[at]);
    });
    return { element, tell };
  }

  colour({ run, metric }) {
    return this.runs.length === 1 ? colour("metric", metric) : colour("run", run.name);
  }

  stroke({ metric }, metrics) {
    return STROKES[this.runs.length === 1 ? 0 : metrics.indexOf(metric)];
  }

  options(chart, series, metrics, key) {
    const ink = variable("--faint"), rule = variable("--rule");
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1, size: 4 }, font: "11px system-ui" };
    return {
      width: this.width(), height: 190, padding: [8, 10, 0, 0],
      cursor: { sync: { key: "steps" }, focus: { prox: 24 }, points: { size: 5 } }, focus: { alpha: 0.3 },
      legend: { show: false }, hooks: { setCursor: [key.tell] },
      scales: { x: { time: false }, y: chart.shares ? { range: [0, 1] } : {} },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick)) }],
      series: [{}, ...series.map((one) => ({
        stroke: this.colour(one), width: 1.5, spanGaps: true,
        dash: this.stroke(one, metrics).dash,
        points: { show: pointsAreFew(one), size: 5 } }))],
    };
  }

  width() {
    const style = getComputedStyle(this.grid);
    return Math.max(parseFloat(style.gridTemplateColumns) - 18 || 380, 240);
  }

  fit() {
    for (const { uplot } of this.plots.values()) if (uplot.width !== this.width()) uplot.setSize({ width: this.width(), height: 190 });
  }

  restyle() {
    for (const { uplot, box } of this.plots.values()) { uplot.destroy(); box.remove(); }
    this.plots.clear();
    this.draw(this.runs);
  }

  close() {
    this.observer.disconnect();
    for (const { uplot } of this.plots.values()) uplot.destroy();
  }
}

// Letters of a metric's name that the chart's title says already.
const below = (chart) => (chart.metrics[0].endsWith("/") ? chart.metrics[0].length : 0);

const pointsAreFew = ({ run, metric }) => run.values[metric].filter((value) => value !== null).length <= Math.max(run.steps.length / 3, 2);

// One axis of steps for all series, with null where a series has no value. A run that repeats a step keeps the last.
function aligned(series) {
  const steps = [...new Set(series.flatMap(({ run }) => run.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  return [steps, ...series.map(({ run, metric }) => {
    const values = new Array(steps.length).fill(null);
    run.values[metric].forEach((value, i) => { values[place.get(run.steps[i])] = value; });
    return values;
  })];
}
