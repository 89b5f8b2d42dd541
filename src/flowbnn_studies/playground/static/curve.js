// Prediction along a curve: intervals, or the functions of sampled networks.

import { el } from "./dom.js";
import { CURVE, extent, markIcon, Plot } from "./plot.js";

export const CURVE_VIEWS = {
  intervals: {
    label: "Intervals",
    title: "Prediction and intervals",
    caption: "The line is the predicted mean. The dark band should contain half of all new points, the light band 90 % of them.",
  },
  functions: {
    label: "Sampled functions",
    title: "Sampled functions",
    caption: "Each thin line is the function of one sampled network. The functions agree where there are data, and should scatter where there are none. The light band contains 90 % of new points.",
  },
};

export class CurveFigure {
  constructor() {
    this.plot = new Plot({ aspect: 0.8, draw: () => this.draw() });
    this.legend = el("div", { class: "legend" });
    this.node = el("div", {}, this.plot.node, this.legend);
  }

  update(result, view, points) {
    Object.assign(this, { result, view, points });
    this.plot.update();
  }

  draw() {
    const { plot, result } = this;
    const range = result?.range ?? 4;
    const [low, high] = result ? extent(this.points.map((point) => point.y), 0.8) : [-range, range];
    plot.axes([-range, range], [Math.max(low, -2 * range), Math.min(high, 2 * range)], "input", "target", { count: [6, 6] });
    if (!result) return;
    const [half, most] = result.intervals;
    plot.band(result.x, most.low, most.high, "band outer");
    if (this.view === "functions") {
      for (const values of result.functions) plot.line(result.x, values, "function");
    } else {
      plot.band(result.x, half.low, half.high, "band inner");
      plot.line(result.x, result.mean, "mean");
    }
    for (const point of this.points) if (!point.held) plot.mark(point, 3.2);
    this.describe();
    const key = (kind, text) => el("span", { class: "key" }, el("i", { class: kind }), text);
    const lines = this.view === "functions"
      ? [key("stroke function", "one network")]
      : [key("stroke mean", "mean"), key("swatch inner", "50 % interval")];
    this.legend.replaceChildren(el("span", { class: "key" }, markIcon(CURVE), "training points"), ...lines, key("swatch outer", "90 % interval"));
  }

  describe() {
    const { result } = this;
    const width = result.intervals[1].high.map((value, index) => value - result.intervals[1].low[index]);
    const widest = width.indexOf(Math.max(...width));
    const scores = result.scores ? ` It contains ${(100 * result.scores.coverage_90).toFixed(0)} % of the held-out points.` : "";
    this.plot.describe(`${CURVE_VIEWS[this.view].title}. The 90 % interval is ${Math.min(...width).toFixed(2)} wide at its narrowest, `
      + `and ${width[widest].toFixed(2)} at input ${result.x[widest].toFixed(1)}.${scores}`);
  }
}
