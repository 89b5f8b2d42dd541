// The page: data on the left, methods and predictions on the right.

import * as api from "./api.js";
import { Board } from "./board.js";
import { CLASS_VIEWS } from "./classmap.js";
import { CURVE_VIEWS } from "./curve.js";
import { el, format, segments, slider } from "./dom.js";
import { MethodForm, ResultPanel } from "./panel.js";
import { CURVE, markIcon } from "./plot.js";

const FIRST = { preset: "two-moons", a: "noise", b: "hmc" };
const EXPERIMENTS = [
  { label: "Far from the data", preset: "two-moons", a: "map", b: "hmc", classes: "entropy",
    hint: "Uncertainty of one network (A) and of the exact posterior (B): which of them notices that the corners are empty?" },
  { label: "A gap in the data", preset: "gap", a: "map", b: "hmc", curve: "functions",
    hint: "There are no points in the middle. A single network (A) does not notice. The networks of Hamiltonian Monte Carlo (B) disagree there." },
  { label: "Flow noise", preset: "ring", a: "noise", b: "dropout", classes: "networks",
    hint: "Learned noise (A) and dropout (B): how much do the borders of single networks differ?" },
];
const LIVE_EVERY = 25; // percent between two announcements of the progress

const $ = (id) => document.getElementById(id);

class App {
  constructor(options, page) {
    this.options = options;
    this.page = page;
    this.views = { classes: "classes", curve: "intervals" };
    this.prediction = { samples: 64, temperature: 1 };
    this.version = 0; // of the points
    this.preset = null;
    this.fitting = false;
    this.board = new Board(options.limits, (text) => this.announce(text), () => this.pointsChanged());
    this.board.plot.node.classList.add("board-plot");
    $("board").replaceChildren(this.board.plot.node);
    $("brushes").replaceChildren(this.board.brushes);
    this.slots = ["a", "b"].map((slot) => this.makeSlot(slot));
    this.makePresets();
    this.makeExperiments();
    this.makePresetSettings();
    this.makeLook();
    this.listen();
    this.arrange();
  }

  get comparing() {
    return $("compare").checked;
  }

  get visible() {
    return this.comparing ? this.slots : this.slots.slice(0, 1);
  }

  makeSlot(name) {
    const slot = { name, fitted: null };
    slot.panel = new ResultPanel((layer, units) => this.selectPair(slot, layer, units));
    slot.form = new MethodForm(name, this.options.methods, FIRST[name], () => this.settingsChanged());
    slot.predict = api.latest(() => this.predict(slot));
    return slot;
  }

  // -------------------- data

  makePresets() {
    const buttons = this.options.presets.map((preset) => {
      const plot = el("span", { class: "preview" });
      plot.append(preview(preset));
      return el("button", { type: "button", class: "preset", "data-name": preset.name, "aria-pressed": "false",
        onclick: () => this.loadPreset(preset.name) }, plot, el("span", { text: preset.label }));
    });
    $("presets").replaceChildren(...buttons);
  }

  makePresetSettings() {
    const { limits } = this.options;
    const number = slider({ name: "number", label: "Training points", help: "A data set is drawn anew with this number.", low: 10, high: limits.max_points, step: 10 }, 160,
      (value) => this.redraw({ number: value }));
    const noise = slider({ name: "noise", label: "Noise", help: "Standard deviation of the noise on the points.", low: 0, high: limits.max_noise, step: 0.02 }, 0.1,
      (value) => this.redraw({ noise: value }));
    this.presetSettings = { number, noise };
    $("preset-settings").replaceChildren(number.node, noise.node,
      el("button", { type: "button", text: "Draw other points", onclick: () => this.redraw({ seed: this.preset.seed + 1 }) }));
    this.requestPreset = api.latest((settings) => this.fetchPreset(settings));
  }

  async loadPreset(name) {
    const preset = this.options.presets.find((each) => each.name === name);
    this.presetSettings.number.set(preset.number);
    this.presetSettings.noise.set(preset.noise);
    $("hint").textContent = preset.hint;
    await this.fetchPreset({ name, number: preset.number, noise: preset.noise, seed: 0 });
  }

  redraw(changes) {
    if (!this.preset) return;
    this.requestPreset({ ...this.preset, ...changes });
  }

  async fetchPreset(settings) {
    try {
      const points = await api.ask("preset", settings);
      this.preset = settings;
      const task = this.board.task;
      this.board.load(points);
      if (task !== points.task) this.taskChanged();
      for (const button of document.querySelectorAll(".preset")) {
        button.setAttribute("aria-pressed", String(button.dataset.name === settings.name));
      }
    } catch (error) {
      this.fail(error);
    }
  }

  taskChanged() {
    for (const slot of this.slots) {
      slot.fitted = null;
      slot.panel.clear();
    }
    this.showLook();
    this.showCode();
  }

  pointsChanged() {
    this.version += 1;
    const { board } = this;
    $("counts").textContent = `${board.count(false)} training points, ${board.count(true)} held-out points.`;
    $("undo").disabled = !board.undoStack.length;
    $("clear").disabled = !board.points.length;
    this.showStale();
  }

  // -------------------- methods

  settingsChanged() {
    if (this.slots) this.showStale();
  }

  /** Returns true if a slot shows the points and settings of the page. */
  isFresh(slot) {
    return slot.fitted?.version === this.version && slot.fitted.settings === JSON.stringify(slot.form.document());
  }

  showStale() {
    for (const slot of this.slots) {
      const reason = !slot.fitted || this.isFresh(slot) ? ""
        : slot.fitted.version !== this.version ? "The points have changed. Press Fit to update." : "The settings have changed. Press Fit to update.";
      slot.panel.setStale(reason);
    }
    const stale = this.visible.filter((slot) => !this.isFresh(slot));
    $("fit").textContent = this.fitting ? "Stop" : this.comparing && stale.length !== 1 ? "Fit both" : "Fit";
    $("fit").classList.toggle("quiet", !this.fitting && stale.length === 0);
  }

  arrange() {
    const { comparing } = this;
    $("forms").replaceChildren(...this.visible.map((slot) => slot.form.node));
    $("results").replaceChildren(...this.visible.map((slot) => slot.panel.node));
    for (const name of ["forms", "results"]) $(name).classList.toggle("two", comparing);
    this.slots.forEach((slot, index) => {
      slot.form.setTitle(comparing ? `Method ${"AB"[index]}` : "Method");
    });
    this.nameResults();
    this.drawResults();
    this.showStale();
    this.showCode();
  }

  nameResults() {
    this.slots.forEach((slot, index) => {
      const label = slot.fitted?.label ?? slot.form.method.label;
      slot.panel.heading.textContent = this.comparing ? `${"AB"[index]}: ${label}` : label;
    });
  }

  // -------------------- fit

  async fitAll() {
    if (this.fitting) {
      await api.ask("stop", { page: this.page });
      return;
    }
    const stale = this.visible.filter((slot) => !this.isFresh(slot));
    const slots = stale.length ? stale : this.visible;
    this.fitting = true;
    this.showStale();
    document.body.classList.add("fitting");
    try {
      for (const slot of slots) await this.fitSlot(slot);
    } catch (error) {
      this.fail(error);
    } finally {
      this.fitting = false;
      document.body.classList.remove("fitting");
      this.showProgress(0);
      this.showStale();
    }
  }

  async fitSlot(slot) {
    const [version, settings] = [this.version, slot.form.document()];
    const points = this.board.points;
    const { label, last_stage: lastStage } = slot.form.method;
    const members = settings.values.members ?? 1;
    slot.panel.begin(settings.values.epochs * members, members);
    slot.panel.heading.textContent = this.comparing ? `${slot.name.toUpperCase()}: ${label}` : label;
    this.say(`${label}: fitting …`);
    let announced = 0;
    const onProgress = (progress) => {
      slot.panel.training.add(progress);
      const percent = Math.floor((100 * progress.epoch) / progress.epochs);
      const quantity = progress.label === "elbo" ? "ELBO" : "log-likelihood";
      const value = slot.panel.training.values.at(-1);
      const done = percent >= 100 ? `${lastStage} …`
        : `epoch ${format(progress.epoch)} of ${format(progress.epochs)}, ${quantity} ${format(value)} nats per point`;
      $("status").textContent = `${label}: ${done}`;
      this.showProgress(percent);
      if (percent >= announced + LIVE_EVERY && percent < 100) {
        announced = percent - (percent % LIVE_EVERY);
        this.announce(`${announced} % of the epochs are done.`);
      }
    };
    try {
      const request = { page: this.page, slot: slot.name, points: this.board.document(), settings, ...this.prediction };
      const answer = await api.fit(request, onProgress);
      if (answer.stopped) throw new Error(answer.stopped);
      slot.fitted = { version, settings: JSON.stringify(settings), label };
      slot.panel.show(answer.result, points);
      slot.asked = { ...this.prediction };
      this.say(this.summary(label, answer.result));
    } catch (error) {
      slot.panel.showNotes([error.message], "error");
      throw error;
    } finally {
      slot.panel.end();
      this.nameResults();
      this.drawResults();
      this.showCode();
    }
  }

  summary(label, result) {
    const scores = result.scores ?? {};
    const parts = [`${label}: fitted in ${result.seconds.toFixed(1)} s`];
    if (scores.accuracy !== undefined) parts.push(`held-out accuracy ${(100 * scores.accuracy).toFixed(1)} %`);
    if (scores.coverage_90 !== undefined) parts.push(`${(100 * scores.coverage_90).toFixed(0)} % of the held-out points are in the 90 % interval`);
    if (scores.nll !== undefined) parts.push(`negative log-likelihood ${scores.nll.toFixed(3)}`);
    return `${parts.join(", ")}.`;
  }

  showProgress(percent) {
    $("bar").setAttribute("aria-valuenow", percent);
    $("bar").classList.toggle("waiting", percent >= 100);
    $("bar").firstElementChild.style.width = `${percent}%`;
  }

  // -------------------- prediction

  makeLook() {
    const { limits } = this.options;
    const samples = slider({ label: "Networks", help: "Number of networks that a prediction averages.", low: 1, high: limits.max_samples, step: 1, logarithmic: true }, 64,
      (value) => this.setPrediction({ samples: value }));
    const temperature = slider({ label: "Temperature", help: "Above 1 less confident, below 1 more confident.", low: 0.25, high: 4, step: 0.05, logarithmic: true }, 1,
      (value) => this.setPrediction({ temperature: value }));
    this.lookSliders = [samples.node, temperature.node];
    this.showLook();
  }

  showLook() {
    const { task } = this.board;
    const views = task === "classes" ? CLASS_VIEWS : CURVE_VIEWS;
    const choices = Object.entries(views).map(([name, view]) => [name, view.label]);
    const { node } = segments("Show", choices, this.views[task], (value) => {
      this.views[task] = value;
      this.drawResults();
    });
    $("look").replaceChildren(node, ...this.lookSliders);
  }

  setPrediction(changes) {
    Object.assign(this.prediction, changes);
    for (const slot of this.visible) if (slot.panel.result) slot.predict();
  }

  async predict(slot) {
    try {
      const request = { page: this.page, slot: slot.name, ...this.prediction };
      const result = await api.ask("predict", request);
      slot.asked = { ...this.prediction };
      slot.panel.show(result);
      this.drawResults();
      this.showCode();
    } catch (error) {
      this.fail(error);
    }
  }

  async selectPair(slot, layer, units) {
    try {
      const { pair } = await api.ask("pair", { page: this.page, slot: slot.name, layer, units });
      slot.panel.show({ pair });
    } catch (error) {
      this.fail(error);
      slot.panel.pair.update(slot.panel.result.pair, slot.panel.result.draws);
    }
  }

  drawResults() {
    const results = this.visible.map((slot) => slot.panel.result).filter((result) => result?.task === "classes");
    const most = results.reduce((value, result) => Math.max(value, ...result.mutual_information), 0.1);
    const classes = Math.max(2, ...results.map((result) => result.probabilities.length));
    const limits = { entropy: Math.log(classes), mutual_information: most };
    for (const slot of this.visible) slot.panel.draw(this.views, limits);
  }

  // -------------------- Python

  showCode() {
    const fitted = this.visible.filter((slot) => slot.panel.result?.code);
    if (!fitted.includes(this.codeSlot)) this.codeSlot = fitted[0];
    $("copy").disabled = !fitted.length;
    $("code").firstElementChild.textContent = this.codeSlot?.panel.result.code ?? "Fit a method to see its program.";
    if (fitted.length < 2) {
      this.codeTabs = null;
      $("code-tabs").replaceChildren();
    } else if (this.codeTabs) {
      this.codeTabs.set(this.codeSlot.name);
    } else {
      this.codeTabs = segments("Program of method", [["a", "A"], ["b", "B"]], this.codeSlot.name, (name) => {
        this.codeSlot = this.slots.find((slot) => slot.name === name);
        this.showCode();
      });
      $("code-tabs").replaceChildren(this.codeTabs.node);
    }
  }

  async copyCode() {
    const text = this.codeSlot.panel.result.code;
    try {
      await navigator.clipboard.writeText(text);
      this.say("The program is in the clipboard.");
      $("copy").textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents($("code"));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      this.say("The program is selected; copy it with Ctrl+C.");
    }
    setTimeout(() => { $("copy").textContent = "Copy"; }, 2000);
  }

  // -------------------- experiments and messages

  makeExperiments() {
    $("experiments").replaceChildren(...EXPERIMENTS.map((experiment) => el("button", {
      type: "button", class: "chip", text: experiment.label, onclick: () => this.runExperiment(experiment),
    })));
  }

  async runExperiment(experiment) {
    if (this.fitting) return;
    Object.assign(this.views, { classes: experiment.classes ?? this.views.classes, curve: experiment.curve ?? this.views.curve });
    $("compare").checked = true;
    this.slots.forEach((slot) => slot.form.setMethod(experiment[slot.name]));
    await this.loadPreset(experiment.preset);
    this.showLook();
    $("hint").textContent = experiment.hint;
    this.arrange();
    $("methods").scrollIntoView({ block: "start" });
    await this.fitAll();
  }

  announce(text) {
    $("live").textContent = text;
  }

  say(text) {
    $("status").textContent = text;
    $("status").classList.remove("error");
    this.announce(text);
  }

  fail(error) {
    this.say(`${error.message.charAt(0).toUpperCase()}${error.message.slice(1)}.`.replace(/\.\.$/, "."));
    $("status").classList.add("error");
  }

  listen() {
    $("fit").addEventListener("click", () => this.fitAll());
    $("compare").addEventListener("change", () => this.arrange());
    $("undo").addEventListener("click", () => this.board.undo());
    $("clear").addEventListener("click", () => this.board.clear());
    $("copy").addEventListener("click", () => this.copyCode());
    $("show-held-out").addEventListener("change", (event) => {
      this.board.showHeldOut = event.target.checked;
      this.board.plot.render();
    });
    window.addEventListener("pageshow", (event) => {
      if (event.persisted) window.location.reload(); // the server has closed the page
    });
    window.addEventListener("pagehide", () => {
      const body = new Blob([JSON.stringify({ page: this.page })], { type: "application/json" });
      navigator.sendBeacon("/api/close", body);
    });
  }
}

/** Returns a small picture of a data set. */
function preview(preset) {
  const size = 56;
  const place = (value) => ((value + 3.2) / 6.4) * size;
  const picture = markIcon(0);
  picture.setAttribute("class", "");
  picture.setAttribute("viewBox", `0 0 ${size} ${size}`);
  picture.replaceChildren();
  for (const [x, y, label] of preset.preview) {
    const circle = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    circle.setAttribute("class", `mark class-${label ?? CURVE}`);
    circle.setAttribute("cx", place(x));
    circle.setAttribute("cy", size - place(y));
    circle.setAttribute("r", 2);
    picture.append(circle);
  }
  return picture;
}

async function start() {
  try {
    const [options, { page }] = await Promise.all([api.options(), api.ask("open")]);
    const app = new App(options, page);
    await app.loadPreset(FIRST.preset);
    $("fit").disabled = false;
    await app.fitAll(); // so that the page has something to show
  } catch (error) {
    $("status").textContent = error.message;
    $("status").classList.add("error");
  }
}

start();
