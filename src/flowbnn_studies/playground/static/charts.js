// Small figures of one fit: training curve, reliability on held-out points, and the posterior of two variables.

import { el, format, svg, unique } from "./dom.js";
import { extent, Plot } from "./plot.js";

/** ELBO or log-likelihood of every epoch. It grows while the fit runs. */
export class TrainingChart {
  constructor() {
    this.title = el("h4", { text: "Training" });
    this.caption = el("figcaption");
    this.plot = new Plot({ aspect: 0.62, draw: () => this.draw() });
    this.node = el("figure", {}, this.title, this.plot.node, this.caption);
    this.start(1, 1);
  }

  start(epochs, members) {
    Object.assign(this, { epochs, members, values: [], quantity: "log_likelihood" });
    this.plot.update();
  }

  add(progress) {
    this.epochs = progress.epochs;
    this.quantity = progress.label;
    this.values.push(...progress.values);
    this.plot.update();
  }

  draw() {
    const elbo = this.quantity === "elbo";
    const name = elbo ? "ELBO" : "log-likelihood";
    this.title.textContent = `Training: ${name}`;
    const values = this.values;
    // the first epochs are far below the others, and would squeeze them
    const shown = values.length > 20 ? values.slice(Math.floor(values.length * 0.03)) : values;
    this.plot.axes([0, this.epochs], extent(shown), "epoch", "nats per point", { count: [4, 4] });
    const part = this.epochs / this.members;
    for (let member = 0; member < this.members; member += 1) {
      const own = values.slice(member * part, (member + 1) * part);
      if (own.length) this.plot.line(own.map((_, index) => member * part + index + 1), own, "trace");
    }
    const last = values.at(-1);
    this.plot.describe(values.length ? `${name} after ${values.length} of ${this.epochs} epochs: ${format(last)} nats per point.` : "No fit yet.");
    const meaning = elbo
      ? "Evidence lower bound: how well the noisy network explains the training points, minus its distance from the prior. Higher is better."
      : "Log-probability of the training points. Higher is a closer fit, which need not be a better one.";
    this.caption.textContent = this.members > 1 ? `${meaning} The networks are trained one after the other.` : meaning;
  }
}

const RELIABILITY = {
  confidence: {
    title: "Reliability",
    axes: ["predicted confidence (%)", "share that is correct (%)"],
    caption: (number) => `Of the ${number} held-out points predicted with a given confidence, how many are correct? On the diagonal the confidence is right; below it the method is overconfident. `
      + "The grey bars are where 95 % of perfectly calibrated methods would be. Larger dots have more points.",
  },
  coverage: {
    title: "Reliability of intervals",
    axes: ["probability of the interval (%)", "share of points inside (%)"],
    caption: (number) => `How many of the ${number} held-out points are inside an interval of a given probability? On the diagonal the intervals have the right width; below it they are too narrow. `
      + "The grey area is where 95 % of perfectly calibrated methods would be.",
  },
};

/** Accuracy against confidence, or coverage against probability, of held-out points. */
export class ReliabilityChart {
  constructor() {
    this.title = el("h4", { text: "Reliability" });
    this.caption = el("figcaption");
    this.plot = new Plot({ aspect: 0.8, draw: () => this.draw() });
    this.node = el("figure", {}, this.title, this.plot.node, this.caption);
  }

  update(result) {
    this.result = result;
    this.plot.update();
  }

  draw() {
    const { plot } = this;
    const data = this.result?.reliability;
    const words = RELIABILITY[data?.kind ?? "confidence"];
    const percent = (value) => `${Math.round(100 * value)} %`;
    this.title.textContent = words.title;
    const number = (value) => String(Math.round(100 * value));
    plot.axes([0, 1], [0, 1], ...words.axes, { count: [5, 5], text: [number, number] });
    plot.line([0, 1], [0, 1], "diagonal");
    if (!data) {
      this.caption.textContent = this.result ? "There are no held-out points. Draw at least four points, or load a data set." : "";
      plot.describe("No held-out points.");
      return;
    }
    const { points } = data;
    const xs = points.map((point) => point.expected);
    const ys = points.map((point) => point.observed);
    if (data.kind === "coverage") {
      plot.band(xs, points.map((point) => point.low), points.map((point) => point.high), "calibrated");
      plot.line(xs, ys, "trace");
    } else {
      const half = 0.6 * (plot.inner / 20);
      for (const point of points) {
        const [top, bottom] = [plot.y(point.high), plot.y(point.low)];
        plot.add("rect", { class: "calibrated", x: plot.x(point.expected) - half / 2, width: half, y: top, height: Math.max(1, bottom - top) });
      }
      plot.line(xs, ys, "trace thin");
      for (const point of points) {
        plot.over.append(svg("circle", { class: "dot", cx: plot.x(point.expected), cy: plot.y(point.observed), r: 2.5 + 7 * Math.sqrt(point.fraction) }));
      }
    }
    this.caption.textContent = words.caption(this.result.num_held_out);
    const worst = points.reduce((most, point) => (Math.abs(point.observed - point.expected) > Math.abs(most.observed - most.expected) ? point : most));
    plot.describe(`${words.title} of ${this.result.num_held_out} held-out points. The largest difference is at ${percent(worst.expected)}: `
      + `${percent(worst.observed)} observed.`);
  }
}

/** Draws of two variables of a layer, with the prior. */
export class PairChart {
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.title = el("h4", { text: "Posterior of two variables" });
    this.caption = el("figcaption");
    this.layer = el("select", { onchange: () => onSelect(this.layer.value, null) });
    this.units = [0, 1].map((axis) => el("input", {
      type: "number", min: 0, step: 1, "aria-label": axis ? "Vertical axis" : "Horizontal axis", onchange: () => this.select(),
    }));
    const id = unique("layer");
    this.layer.id = id;
    this.controls = el("div", { class: "pair-controls" }, el("label", { for: id, text: "Layer" }), this.layer,
      el("span", { text: "units" }), ...this.units);
    this.plot = new Plot({ aspect: 0.8, draw: () => this.draw() });
    this.node = el("figure", {}, this.title, this.controls, this.plot.node, this.caption);
  }

  select() {
    const units = this.units.map((input) => Math.round(Number(input.value)));
    this.onSelect(this.layer.value, units);
  }

  update(pair, kind) {
    Object.assign(this, { pair, kind });
    if (pair) {
      const names = Object.keys(pair.layers);
      this.layer.replaceChildren(...names.map((name) => el("option", { value: name, text: `${name} (${pair.layers[name]})` })));
      this.layer.value = pair.layer;
      this.units.forEach((input, axis) => {
        input.max = pair.layers[pair.layer] - 1;
        input.value = pair.units[axis];
      });
    }
    this.controls.hidden = !pair;
    this.plot.update();
  }

  draw() {
    const { plot, pair } = this;
    if (!pair) {
      plot.axes([0, 1], [0, 1], "", "");
      return;
    }
    const noise = this.kind === "noise";
    this.title.textContent = noise ? "Posterior of two noise variables" : "Posterior of two weights";
    const word = noise ? "noise of unit" : "weight";
    const prior = pair.prior;
    const spread = prior && noise ? [prior[0] - 2.2 * prior[1], prior[0] + 2.2 * prior[1]] : [];
    const around = pair.distinct === 1 ? [-0.5, 0.5] : [0]; // one dot needs some space
    const ranges = [0, 1].map((axis) => extent([...pair.draws.flatMap((draw) => around.map((shift) => draw[axis] + shift)), ...spread], 0.08));
    plot.axes(...ranges, `${word} ${pair.units[0]}`, `${word} ${pair.units[1]}`, { count: [4, 4] });
    if (prior) {
      for (const factor of [1, 2]) {
        const [cx, cy] = [plot.x(prior[0]), plot.y(prior[0])];
        plot.add("ellipse", {
          class: "prior", cx, cy,
          rx: plot.x(prior[0] + factor * prior[1]) - cx, ry: cy - plot.y(prior[0] + factor * prior[1]),
        });
      }
    }
    for (const [place, count] of this.places()) {
      const [x, y] = place;
      plot.add("circle", { class: "draw", cx: plot.x(x), cy: plot.y(y), r: Math.min(12, 2 * Math.sqrt(count)) });
    }
    this.explain();
  }

  /** Returns the distinct draws with their numbers. */
  places() {
    const counts = new Map();
    for (const draw of this.pair.draws) {
      const key = draw.join();
      counts.set(key, [draw, (counts.get(key)?.[1] ?? 0) + 1]);
    }
    return counts.values();
  }

  explain() {
    const { pair } = this;
    const noise = this.kind === "noise";
    const parts = [];
    if (pair.distinct === 1) parts.push("A single network has one value of each weight, and no posterior.");
    else parts.push(`Each dot is one draw from the posterior (${pair.draws.length} draws${pair.distinct < pair.draws.length ? `, ${pair.distinct} of them different` : ""}).`);
    if (noise && !pair.prior) parts.push("Dropout keeps a unit, and enlarges it, or sets it to 0.");
    else if (noise) parts.push("Noise multiplies the value of a unit; 1 changes nothing.");
    if (pair.prior) parts.push("The dashed circles are one and two standard deviations of the prior: the distribution before any data.");
    if (pair.correlation !== null) parts.push(`Correlation: ${pair.correlation.toFixed(2)}.`);
    this.caption.textContent = parts.join(" ");
    this.plot.describe(`${this.title.textContent}: ${pair.distinct} different draws`
      + `${pair.correlation === null ? "" : `, correlation ${pair.correlation.toFixed(2)}`}.`);
  }
}
