// Axes of a figure: scales, ticks, labels, marks, and a canvas behind them for maps.

import { el, svg, unique } from "./dom.js";

export const CURVE = 3; // stands for the class of points of a curve
const MARGIN = { left: 54, right: 10, top: 10, bottom: 40 };

/** Returns at most about count round numbers between two ends. */
export function ticks(low, high, count = 5) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

/** Returns a range a little larger than the values. */
export function extent(values, margin = 0.05) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  const space = Math.max((high - low) * margin, 1e-3 * Math.max(1, Math.abs(high)));
  return [low - space, high + space];
}

/**
 * Figure with axes that is drawn again when its width changes.
 *
 * draw(plot) is called after the axes are known; it calls axes() and adds marks.
 */
export class Plot {
  constructor({ aspect = 1, label, draw, raster = false }) {
    this.aspect = aspect;
    this.draw = draw;
    this.canvas = raster ? el("canvas", { "aria-hidden": "true" }) : null;
    this.svg = svg("svg", { role: "img", "aria-label": label ?? "" });
    this.node = el("div", { class: "plot" }, ...(raster ? [this.canvas] : []), this.svg);
    this.clip = unique("clip");
    this.width = 0;
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width > 0 && width !== this.width) {
        this.width = width;
        this.render();
      }
    }).observe(this.node);
  }

  /** Describes the figure in words, for those who cannot see it. */
  describe(text) {
    this.svg.setAttribute("aria-label", text);
  }

  /** Draws the figure again before the next frame, however often it is called until then. */
  update() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.render();
    });
  }

  render() {
    if (!this.width) return;
    this.inner = this.width - MARGIN.left - MARGIN.right;
    this.depth = Math.round(this.inner * this.aspect);
    this.height = this.depth + MARGIN.top + MARGIN.bottom;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.style.height = `${this.height}px`;
    const area = { x: MARGIN.left, y: MARGIN.top, width: this.inner, height: this.depth };
    this.marks = svg("g", { "clip-path": `url(#${this.clip})` });
    this.over = svg("g"); // marks that may cross the frame
    this.frame = svg("g");
    this.svg.replaceChildren(
      svg("defs", {}, svg("clipPath", { id: this.clip }, svg("rect", area))), this.frame, this.marks, this.over);
    if (this.canvas) {
      const place = this.canvas.style;
      [place.left, place.top] = [`${MARGIN.left}px`, `${MARGIN.top}px`];
      [place.width, place.height] = [`${this.inner}px`, `${this.depth}px`];
    }
    this.draw(this);
  }

  /** Draws axes with labels. The ranges are [low, high]. */
  axes(x, y, xLabel, yLabel, { grid = true, count = [5, 5], text = [String, String] } = {}) {
    this.ranges = { x, y };
    const { left, top } = MARGIN;
    const bottom = top + this.depth;
    for (const value of ticks(...x, count[0])) {
      const place = this.x(value);
      if (grid) this.frame.append(svg("line", { class: "grid", x1: place, x2: place, y1: top, y2: bottom }));
      this.frame.append(svg("text", { class: "tick", x: place, y: bottom + 16, "text-anchor": "middle", text: text[0](value) }));
    }
    for (const value of ticks(...y, count[1])) {
      const place = this.y(value);
      if (grid) this.frame.append(svg("line", { class: "grid", x1: left, x2: left + this.inner, y1: place, y2: place }));
      this.frame.append(svg("text", { class: "tick", x: left - 7, y: place + 4, "text-anchor": "end", text: text[1](value) }));
    }
    const middle = top + this.depth / 2;
    this.frame.append(
      svg("rect", { class: "frame", x: left, y: top, width: this.inner, height: this.depth }),
      svg("text", { class: "axis", x: left + this.inner / 2, y: bottom + 34, "text-anchor": "middle", text: xLabel }),
      svg("text", { class: "axis", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`, text: yLabel }));
  }

  x(value) {
    const [low, high] = this.ranges.x;
    return MARGIN.left + ((value - low) / (high - low)) * this.inner;
  }

  y(value) {
    const [low, high] = this.ranges.y;
    return MARGIN.top + (1 - (value - low) / (high - low)) * this.depth;
  }

  /** Returns the data coordinates of a place on the screen. */
  locate(clientX, clientY) {
    const box = this.svg.getBoundingClientRect();
    const across = ((clientX - box.left) / box.width) * this.width;
    const down = ((clientY - box.top) / box.height) * this.height;
    const [xLow, xHigh] = this.ranges.x;
    const [yLow, yHigh] = this.ranges.y;
    return [
      xLow + ((across - MARGIN.left) / this.inner) * (xHigh - xLow),
      yLow + (1 - (down - MARGIN.top) / this.depth) * (yHigh - yLow),
    ];
  }

  add(tag, attributes, ...children) {
    const node = svg(tag, attributes, ...children);
    this.marks.append(node);
    return node;
  }

  /** Draws a line through points. */
  line(xs, ys, style) {
    const path = xs.map((x, index) => `${index ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(ys[index]).toFixed(1)}`);
    return this.add("path", { class: style, d: path.join("") });
  }

  /** Fills the area between two curves. */
  band(xs, low, high, style) {
    const upper = xs.map((x, index) => `${this.x(x).toFixed(1)} ${this.y(high[index]).toFixed(1)}`);
    const lower = xs.map((x, index) => `${this.x(x).toFixed(1)} ${this.y(low[index]).toFixed(1)}`).reverse();
    return this.add("path", { class: style, d: `M${upper.join("L")}L${lower.join("L")}Z` });
  }

  /** Draws a mark of a class: a circle, a triangle or a square, filled for training points and hollow for held-out points. */
  mark(point, size = 4.2) {
    this.marks.append(mark(this.x(point.x), this.y(point.y), point.label, point.held, size));
  }
}

/** Returns the mark of a class. Shape and colour both tell the class. */
export function mark(x, y, label, hollow = false, size = 4.2) {
  const style = `mark class-${label}${hollow ? " held" : ""}`;
  if (label === 1) {
    const r = size * 1.25;
    return svg("path", { class: style, d: `M${x} ${y - r}L${x + r * 0.95} ${y + r * 0.7}L${x - r * 0.95} ${y + r * 0.7}Z` });
  }
  if (label === 2) {
    const r = size * 0.9;
    return svg("rect", { class: style, x: x - r, y: y - r, width: 2 * r, height: 2 * r });
  }
  return svg("circle", { class: style, cx: x, cy: y, r: size });
}

/** Returns a mark in a small picture of its own, for legends and buttons. */
export function markIcon(label, hollow = false) {
  return svg("svg", { class: "icon", viewBox: "0 0 14 14", "aria-hidden": "true" }, mark(7, 7, label, hollow, 4.6));
}
