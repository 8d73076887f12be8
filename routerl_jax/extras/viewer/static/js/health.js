// The health panel: alarms of config.watch, and the vitals of each run.

import { fill, h, svg } from "./dom.js";
import { number } from "./format.js";

export function drawHealth(root, runs) {
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
