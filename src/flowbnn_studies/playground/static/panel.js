// One method of the page: its form, and the figures of its result.

import { ClassMap, CLASS_VIEWS } from "./classmap.js";
import { CurveFigure, CURVE_VIEWS } from "./curve.js";
import { PairChart, ReliabilityChart, TrainingChart } from "./charts.js";
import { dropdown, el, format, slider, unique } from "./dom.js";

const SCORES = {
  accuracy: ["Accuracy", (value) => `${(100 * value).toFixed(1)} %`],
  nll: ["NLL", (value) => value.toFixed(3)],
  ece: ["ECE", (value) => value.toFixed(3)],
  rmse: ["RMSE", (value) => value.toFixed(3)],
  coverage_90: ["Coverage", (value) => `${(100 * value).toFixed(0)} %`],
};

/** Form of a method and of its settings. Values are kept when the method changes, if the new one has them. */
export class MethodForm {
  constructor(slot, methods, name, onChange) {
    Object.assign(this, { slot, methods, onChange, values: {} });
    const id = unique("method");
    this.select = el("select", { id, class: "method", onchange: () => this.setMethod(this.select.value) },
      ...methods.map((method) => el("option", { value: method.name, text: method.label })));
    this.summary = el("p", { class: "summary" });
    this.fields = el("div", { class: "settings" });
    this.label = el("label", { for: id, class: "method-label", text: "Method" });
    this.overview = el("summary");
    this.node = el("div", { class: "card form" }, this.label, this.select, this.summary,
      el("details", {}, this.overview, this.fields));
    this.setMethod(name);
  }

  get method() {
    return this.methods.find((method) => method.name === this.select.value);
  }

  setMethod(name, values = {}) {
    this.select.value = name;
    Object.assign(this.values, values);
    this.summary.textContent = this.method.summary;
    this.nodes = new Map();
    for (const setting of this.method.settings) {
      const value = this.values[setting.name] ?? setting.default;
      const change = (next) => {
        this.values[setting.name] = next;
        this.showRelevant();
        this.onChange();
      };
      const control = setting.choices ? dropdown(setting, value, change) : slider(setting, value, change);
      this.nodes.set(setting, control);
    }
    this.fields.replaceChildren(...[...this.nodes.values()].map((control) => control.node));
    this.showRelevant();
    this.onChange();
  }

  /** Hides settings that have no effect on the chosen variant, and sums up the others. */
  showRelevant() {
    const words = [];
    for (const [setting, control] of this.nodes) {
      control.node.hidden = Boolean(setting.only) && !setting.only[1].includes(this.value(setting.only[0]));
      const value = this.value(setting.name);
      if (setting.choices) words.push(setting.choices[value]);
      else if (!control.node.hidden && setting.name === "epochs") words.push(`${format(value)} epochs`);
    }
    words.push(`${this.value("depth")} × ${this.value("width")} units`);
    this.overview.replaceChildren("Settings ", el("span", { class: "overview", text: words.join(", ") }));
  }

  value(name) {
    return this.values[name] ?? this.method.settings.find((setting) => setting.name === name).default;
  }

  /** Returns the settings in the form of the server. */
  document() {
    const values = Object.fromEntries(this.method.settings.map((setting) => [setting.name, this.value(setting.name)]));
    return { method: this.method.name, values };
  }

  setTitle(text) {
    this.label.textContent = text;
  }
}

/** Figures of one fit. */
export class ResultPanel {
  constructor(onPair) {
    this.heading = el("h3");
    this.time = el("span", { class: "time" });
    this.map = new ClassMap();
    this.curve = new CurveFigure();
    this.mapTitle = el("h4");
    this.mapCaption = el("figcaption");
    this.figure = el("div", { class: "figure-slot" });
    this.mapFigure = el("figure", { class: "main-figure" }, this.mapTitle, this.figure, this.mapCaption);
    this.scores = el("dl", { class: "scores" });
    this.notes = el("ul", { class: "notes" });
    this.stale = el("p", { class: "stale", hidden: true });
    this.training = new TrainingChart();
    this.reliability = new ReliabilityChart();
    this.pair = new PairChart(onPair);
    this.body = el("div", { class: "figures" }, this.mapFigure,
      el("div", { class: "side" }, this.scores, this.training.node), this.reliability.node, this.pair.node);
    this.empty = el("p", { class: "empty", text: "Press Fit to see the prediction of this method." });
    this.node = el("article", { class: "card panel" }, el("div", { class: "panel-head" }, this.heading, this.time),
      this.stale, this.notes, this.empty, this.body);
    this.result = null;
    this.body.hidden = true;
  }

  /** Prepares the training curve of a new fit. */
  begin(epochs, members) {
    this.empty.hidden = true;
    this.body.hidden = false;
    this.training.start(epochs, members);
    this.node.classList.add("busy");
    this.notes.replaceChildren();
  }

  end() {
    this.node.classList.remove("busy");
    if (!this.result) {
      this.body.hidden = true;
      this.empty.hidden = false;
    }
  }

  clear() {
    this.result = null;
    this.body.hidden = true;
    this.empty.hidden = false;
    this.notes.replaceChildren();
    this.time.textContent = "";
    this.setStale("");
  }

  /** Shows a result, or the part of it that a prediction has changed. */
  show(result, points) {
    this.result = { ...this.result, ...result };
    this.points = points ?? this.points;
    if (result.seconds !== undefined) this.time.textContent = `fitted in ${result.seconds.toFixed(1)} s`;
    if (result.notes) this.showNotes(result.notes, "note");
    if (result.pair) this.pair.update(result.pair, this.result.draws);
    this.reliability.update(this.result);
    this.showScores();
  }

  showNotes(notes, kind) {
    this.notes.replaceChildren(...notes.map((note) => el("li", { class: kind, text: note })));
  }

  showScores() {
    const { scores } = this.result;
    const entries = scores ? Object.keys(SCORES).filter((name) => name in scores) : [];
    this.scores.replaceChildren(...entries.map((name) => {
      const [label, text] = SCORES[name];
      return el("div", {}, el("dt", { text: label }), el("dd", { text: text(scores[name]) }));
    }));
  }

  /** Draws the main figure. limits has the largest uncertainties of both methods. */
  draw(views, limits) {
    if (!this.result) return;
    const classes = this.result.task === "classes";
    const figure = classes ? this.map : this.curve;
    const view = classes ? views.classes : views.curve;
    const words = (classes ? CLASS_VIEWS : CURVE_VIEWS)[view];
    if (this.figure.firstChild !== figure.node) this.figure.replaceChildren(figure.node);
    this.mapTitle.textContent = words.title;
    this.mapCaption.textContent = words.caption;
    figure.update(this.result, view, this.points, limits);
  }

  setStale(text) {
    this.stale.textContent = text;
    this.stale.hidden = !text;
  }
}
