// Drawing area for points: by mouse, by touch and by keyboard.

import { el, format, segments } from "./dom.js";
import { CURVE, markIcon, Plot } from "./plot.js";

const NAMES = ["class A", "class B", "class C"];
const SPACING = { classes: 0.22, curve: 0.14 }; // distance of points that a stroke adds
const ERASER = 0.3; // radius
const HELD_OUT_EVERY = 4;
const MAX_UNDO = 40;

export class Board {
  constructor(limits, announce, onChange) {
    this.limits = limits;
    this.announce = announce;
    this.onChange = onChange;
    this.task = "classes";
    this.points = [];
    this.undoStack = [];
    this.brush = 0;
    this.drawn = 0;
    this.showHeldOut = false;
    this.cursor = [0, 0];
    this.hasFocus = false;
    this.brushes = el("div");
    this.plot = new Plot({ draw: () => this.draw() });
    const node = this.plot.svg;
    node.setAttribute("role", "application");
    node.setAttribute("tabindex", "0");
    node.setAttribute("aria-describedby", "board-help");
    node.addEventListener("pointerdown", (event) => this.press(event));
    node.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel"]) node.addEventListener(name, () => this.release());
    node.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["focus", "blur"]) {
      node.addEventListener(name, () => {
        this.hasFocus = name === "focus" && node.matches(":focus-visible");
        this.plot.render();
      });
    }
    this.makeBrushes();
  }

  makeBrushes() {
    const classes = NAMES.slice(0, this.limits.classes).map((name, label) => [String(label), name, markIcon(label)]);
    const choices = this.task === "classes" ? classes : [[String(CURVE), "Draw", markIcon(CURVE)]];
    const { node, set } = segments("Brush", [...choices, ["erase", "Erase"]], choices[0][0], (value) => {
      this.brush = value === "erase" ? "erase" : Number(value);
    });
    this.brush = Number(choices[0][0]);
    this.setBrush = set;
    this.brushes.replaceChildren(node);
  }

  /** Replaces all points by those of a document of the server. */
  load(document) {
    if (this.points.length) this.remember();
    if (document.task !== this.task) {
      this.task = document.task;
      this.undoStack = []; // points of the other kind cannot come back
      this.makeBrushes();
    }
    const read = (rows, held) => rows.map(([x, y, label]) => ({ x, y, label: label ?? CURVE, held, drawn: false }));
    this.points = [...read(document.train, false), ...read(document.held_out, true)];
    this.drawn = 0;
    this.changed();
  }

  /** Returns the points in the form of the server. */
  document() {
    const rows = (held) => this.points.filter((point) => point.held === held)
      .map(({ x, y, label }) => (this.task === "classes" ? [x, y, label] : [x, y]));
    return { task: this.task, train: rows(false), held_out: rows(true) };
  }

  count(held) {
    return this.points.reduce((sum, point) => sum + (point.held === held), 0);
  }

  remember() {
    this.undoStack.push({ points: this.points, drawn: this.drawn });
    if (this.undoStack.length > MAX_UNDO) this.undoStack.shift();
  }

  undo() {
    const last = this.undoStack.pop();
    if (!last) return;
    Object.assign(this, last);
    this.changed();
  }

  clear() {
    if (!this.points.length) return;
    this.remember();
    this.points = [];
    this.drawn = 0;
    this.changed();
  }

  changed() {
    this.plot.render();
    this.onChange();
  }

  /** Adds a point of the brush. Returns false if there are too many. */
  add(x, y) {
    const { range, max_points: most } = this.limits;
    const held = this.drawn % HELD_OUT_EVERY === HELD_OUT_EVERY - 1;
    if (Math.abs(x) > range || Math.abs(y) > range) return false;
    if (this.count(held) >= most) {
      this.announce(`There are ${most} points, the largest number. Erase some first.`);
      return false;
    }
    const label = this.brush === "erase" ? (this.task === "classes" ? 0 : CURVE) : this.brush;
    const point = { x: Number(x.toFixed(2)), y: Number(y.toFixed(2)), label, held, drawn: true };
    this.points = [...this.points, point];
    this.drawn += 1;
    return point;
  }

  /** Removes the points near a place. */
  erase(x, y, radius = ERASER) {
    const left = this.points.filter((point) => Math.hypot(point.x - x, point.y - y) > radius);
    const removed = this.points.length - left.length;
    this.points = left;
    return removed;
  }

  press(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.plot.svg.setPointerCapture(event.pointerId);
    this.remember();
    this.stroke = null;
    this.apply(this.plot.locate(event.clientX, event.clientY));
  }

  drag(event) {
    if (this.stroke === undefined || !event.buttons) return;
    this.apply(this.plot.locate(event.clientX, event.clientY));
  }

  release() {
    if (this.stroke === undefined) return;
    this.stroke = undefined;
    this.onChange();
  }

  apply([x, y]) {
    if (this.brush === "erase") {
      this.stroke = [x, y];
      if (this.erase(x, y)) this.plot.render();
      return;
    }
    const far = !this.stroke || Math.hypot(x - this.stroke[0], y - this.stroke[1]) >= SPACING[this.task];
    if (far && this.add(x, y)) {
      this.stroke = [x, y];
      this.plot.render();
    }
  }

  key(event) {
    const step = event.shiftKey ? 1 : 0.2;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    const move = moves[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) {
      const { range } = this.limits;
      this.cursor = this.cursor.map((value, axis) => {
        const moved = value + step * move[axis];
        return Number(Math.min(range, Math.max(-range, moved)).toFixed(2));
      });
      this.announce(this.cursor.map((value) => format(value)).join(", "));
    } else if (event.key === "Enter" || event.key === " ") {
      this.remember();
      const point = this.add(...this.cursor);
      if (point) this.announce(`${point.held ? "Held-out point" : "Point"} of ${this.nameOf(point)} at ${point.x}, ${point.y}.`);
      this.onChange();
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.removeNearest();
    } else if (this.task === "classes" && ["1", "2", "3"].includes(event.key) && Number(event.key) <= this.limits.classes) {
      this.brush = Number(event.key) - 1;
      this.setBrush(String(this.brush));
      this.announce(`Brush: ${NAMES[this.brush]}.`);
    } else return;
    event.preventDefault();
    this.hasFocus = true;
    this.plot.render();
  }

  nameOf(point) {
    return this.task === "classes" ? NAMES[point.label] : "the curve";
  }

  removeNearest() {
    const distance = (point) => Math.hypot(point.x - this.cursor[0], point.y - this.cursor[1]);
    const near = this.points.filter((point) => distance(point) <= 0.5).sort((a, b) => distance(a) - distance(b))[0];
    if (!near) {
      this.announce("There is no point near the crosshair.");
      return;
    }
    this.remember();
    this.points = this.points.filter((point) => point !== near);
    this.announce(`Removed the point at ${near.x}, ${near.y}.`);
    this.onChange();
  }

  draw() {
    const { range } = this.limits;
    const labels = this.task === "classes" ? ["input 1", "input 2"] : ["input", "target"];
    this.plot.axes([-range, range], [-range, range], ...labels, { count: [4, 4] });
    for (const point of this.points) {
      if (!point.held || point.drawn || this.showHeldOut) this.plot.mark(point, 3.6);
    }
    if (this.hasFocus) {
      const [x, y] = [this.plot.x(this.cursor[0]), this.plot.y(this.cursor[1])];
      this.plot.add("path", { class: "crosshair", d: `M${x - 14} ${y}H${x - 4}M${x + 4} ${y}H${x + 14}M${x} ${y - 14}V${y - 4}M${x} ${y + 4}V${y + 14}` });
    }
    this.plot.describe(`Drawing area with ${this.count(false)} training points and ${this.count(true)} held-out points.`);
  }
}
