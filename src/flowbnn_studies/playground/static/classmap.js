// Map of the prediction over the plane: classes, uncertainties, or the borders of single networks.

import { el } from "./dom.js";
import { markIcon, Plot } from "./plot.js";
import { between, colour, onThemeChange, ramp } from "./theme.js";

const FINE = 4; // pixels between two points of the grid
const STRENGTH = 0.8; // of the colour of a class where it is certain

export const CLASS_VIEWS = {
  classes: {
    label: "Class",
    title: "Most probable class",
    caption: "The colour is the most probable class, and it fades where the prediction is uncertain. The line is the border between the classes.",
  },
  entropy: {
    label: "Uncertainty",
    title: "Total uncertainty",
    caption: "Entropy of the predicted class, in nats. It is 0 where one class is certain, and largest where all classes are equally probable: because the classes overlap there, or because there are no data.",
  },
  mutual_information: {
    label: "Disagreement",
    title: "Disagreement of the networks",
    caption: "Mutual information of class and network, in nats. It is large where the sampled networks contradict each other: the part of the uncertainty that more data would remove. A single network has none.",
  },
  networks: {
    label: "Single networks",
    title: "Borders of single networks",
    caption: "Each line is the border between the classes of one sampled network. The lines agree where the data determine the border, and scatter where they do not.",
  },
};

export class ClassMap {
  constructor() {
    this.plot = new Plot({ draw: () => this.draw(), raster: true });
    this.legend = el("div", { class: "legend" });
    this.node = el("div", {}, this.plot.node, this.legend);
    onThemeChange(() => this.plot.render());
  }

  /** Shows a result. limits has the largest value of each uncertainty, which both methods share. */
  update(result, view, points, limits) {
    Object.assign(this, { result, view, points, limits });
    this.plot.update();
  }

  draw() {
    const { plot, result } = this;
    const range = result?.range ?? 4;
    plot.axes([-range, range], [-range, range], "input 1", "input 2", { grid: false, count: [4, 4] });
    if (!result) return;
    const classes = result.probabilities.length;
    if (this.view === "classes" || this.view === "networks") this.paintClasses(this.view === "networks" ? 0.35 : 1);
    else this.paintUncertainty(result[this.view], this.limits[this.view]);
    if (this.view === "networks") {
      for (const network of result.networks) {
        const rest = network[0].map((_, index) => 100 - network.reduce((sum, values) => sum + values[index], 0));
        this.borders([rest, ...network], "border single");
      }
    } else if (this.view === "classes") {
      this.borders(result.probabilities, "border");
    }
    for (const point of this.points) if (!point.held) plot.mark(point, 3.4);
    this.describe(classes);
    this.showLegend(classes);
  }

  /** Draws the borders between the classes of some probabilities. */
  borders(probabilities, style) {
    const fields = probabilities.length === 2
      ? [probabilities[0].map((value, index) => value - probabilities[1][index])]
      : probabilities.map((values, label) => values.map((value, index) =>
        value - Math.max(...probabilities.map((each, other) => (other === label ? -Infinity : each[index])))));
    const path = fields.map((field) => contour(field, this.result.size, (x, y) => {
      const step = (2 * this.result.range) / (this.result.size - 1);
      return `${this.plot.x(x * step - this.result.range).toFixed(1)} ${this.plot.y(y * step - this.result.range).toFixed(1)}`;
    })).join("");
    this.plot.add("path", { class: style, d: path });
  }

  paintClasses(strength) {
    const { probabilities } = this.result;
    const classes = probabilities.length;
    const background = colour("plot");
    const colours = probabilities.map((_, label) => between([background, colour(`class-${label}`)], STRENGTH * strength));
    this.paint(probabilities, (values, pixel) => {
      let best = 0;
      for (let label = 1; label < classes; label += 1) if (values[label] > values[best]) best = label;
      const share = Math.max(0, (values[best] - 1 / classes) / (1 - 1 / classes));
      for (let channel = 0; channel < 3; channel += 1) {
        pixel[channel] = background[channel] + share * (colours[best][channel] - background[channel]);
      }
    });
  }

  paintUncertainty(values, limit) {
    const colours = ramp();
    const table = Array.from({ length: 256 }, (_, index) => between(colours, index / 255));
    this.paint([values], ([value], pixel) => {
      const rgb = table[Math.min(255, Math.max(0, Math.round((255 * value) / limit)))];
      for (let channel = 0; channel < 3; channel += 1) pixel[channel] = rgb[channel];
    });
  }

  /** Paints the canvas: interpolates fields between the points of the grid. setColour(values, pixel) colours each pixel. */
  paint(fields, setColour) {
    const { size } = this.result;
    const pixels = (size - 1) * FINE + 1;
    const canvas = this.plot.canvas;
    [canvas.width, canvas.height] = [pixels, pixels];
    const context = canvas.getContext("2d");
    const image = context.createImageData(pixels, pixels);
    const values = new Array(fields.length).fill(0);
    const pixel = [0, 0, 0];
    for (let row = 0; row < pixels; row += 1) {
      const down = (pixels - 1 - row) / FINE;
      const y = Math.min(Math.floor(down), size - 2);
      const v = down - y;
      for (let column = 0; column < pixels; column += 1) {
        const x = Math.min(Math.floor(column / FINE), size - 2);
        const u = column / FINE - x;
        const at = x * size + y;
        for (let index = 0; index < fields.length; index += 1) {
          const field = fields[index];
          const left = field[at] + v * (field[at + 1] - field[at]);
          const right = field[at + size] + v * (field[at + size + 1] - field[at + size]);
          values[index] = left + u * (right - left);
        }
        setColour(values, pixel);
        const place = 4 * (row * pixels + column);
        image.data[place] = pixel[0];
        image.data[place + 1] = pixel[1];
        image.data[place + 2] = pixel[2];
        image.data[place + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
  }

  describe(classes) {
    const { result, view } = this;
    const mean = (values) => (values.reduce((sum, value) => sum + value, 0) / values.length).toFixed(2);
    const scores = result.scores ? ` Held-out accuracy ${(100 * result.scores.accuracy).toFixed(0)} %.` : "";
    this.plot.describe(`${CLASS_VIEWS[view].title}, ${classes} classes. Mean entropy over the map ${mean(result.entropy)} nats, `
      + `mean disagreement ${mean(result.mutual_information)} nats.${scores}`);
  }

  showLegend(classes) {
    const names = ["class A", "class B", "class C"].slice(0, classes);
    const marks = names.map((name, label) => el("span", { class: "key" }, markIcon(label), name));
    if (this.view === "classes" || this.view === "networks") {
      const lines = this.view === "networks" ? [el("span", { class: "key" }, el("i", { class: "stroke single" }), "border of one network")] : [];
      this.legend.replaceChildren(...marks, ...lines);
      return;
    }
    const limit = this.limits[this.view];
    const bar = el("canvas", { width: 128, height: 1, class: "colourbar", "aria-hidden": "true" });
    const context = bar.getContext("2d");
    const image = context.createImageData(128, 1);
    const colours = ramp();
    for (let index = 0; index < 128; index += 1) image.data.set([...between(colours, index / 127), 255], 4 * index);
    context.putImageData(image, 0, 0);
    const end = this.view === "entropy" ? `${limit.toFixed(2)} nats (a guess)` : `${limit.toFixed(2)} nats`;
    this.legend.replaceChildren(el("span", { class: "key" }, "0", bar, end), ...marks);
  }
}

/** Returns the path where a field [x * size + y] is zero, by marching squares. */
export function contour(field, size, place) {
  const path = [];
  for (let x = 0; x < size - 1; x += 1) {
    for (let y = 0; y < size - 1; y += 1) {
      const corners = [[x, y], [x + 1, y], [x + 1, y + 1], [x, y + 1]];
      const values = corners.map(([i, j]) => field[i * size + j]);
      if (values.every((value) => value > 0) || values.every((value) => value <= 0)) continue;
      const crossings = [];
      for (let side = 0; side < 4; side += 1) {
        const [a, b] = [values[side], values[(side + 1) % 4]];
        if (a > 0 === b > 0) continue;
        const share = a / (a - b);
        const [from, to] = [corners[side], corners[(side + 1) % 4]];
        crossings.push([from[0] + share * (to[0] - from[0]), from[1] + share * (to[1] - from[1])]);
      }
      for (let index = 0; index + 1 < crossings.length; index += 2) {
        path.push(`M${place(...crossings[index])}L${place(...crossings[index + 1])}`);
      }
    }
  }
  return path.join("");
}
