// Small helpers to build elements, and the controls that forms are made of.

const SVG = "http://www.w3.org/2000/svg";
const integers = new Intl.NumberFormat("en-US");
let counter = 0;

/** Returns a new element. Attributes that begin with "on" are event listeners; "text" is the text content. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Returns a new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Returns an id that no other element has. */
export function unique(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

/** Returns a number in as few digits as needed. */
export function format(value, digits = 3) {
  if (Number.isInteger(value)) return integers.format(value);
  return String(Number(value.toPrecision(digits)));
}

/** Returns a slider with its label and value. The slider of a logarithmic setting moves by factors. */
export function slider(setting, value, onInput) {
  const id = unique("setting");
  const log = setting.logarithmic;
  const round = (raw) => {
    if (!log) return raw;
    const limits = [setting.low, setting.high];
    const number = Number(Math.exp(raw).toPrecision(2));
    const stepped = number >= 10 * setting.step ? Math.round(number / setting.step) * setting.step : number;
    return Math.min(limits[1], Math.max(limits[0], Number(stepped.toPrecision(4))));
  };
  const output = el("output", { for: id, text: format(value) });
  const input = el("input", {
    type: "range", id, "aria-describedby": `${id}-help`,
    min: log ? Math.log(setting.low) : setting.low,
    max: log ? Math.log(setting.high) : setting.high,
    step: log ? (Math.log(setting.high) - Math.log(setting.low)) / 60 : setting.step,
  });
  const show = (number) => {
    output.textContent = format(number);
    input.setAttribute("aria-valuetext", format(number));
  };
  const set = (number) => {
    input.value = log ? Math.log(number) : number;
    show(number);
  };
  input.addEventListener("input", () => {
    const number = round(Number(input.value));
    show(number);
    onInput(number);
  });
  set(value);
  const node = el("div", { class: "setting" },
    el("label", { for: id, text: setting.label }), output, input,
    el("p", { class: "help", id: `${id}-help`, text: setting.help }));
  return { node, input, set };
}

/** Returns a drop-down list with its label. */
export function dropdown(setting, value, onInput) {
  const id = unique("setting");
  const choices = Object.entries(setting.choices).map(([name, label]) => el("option", { value: name, text: label }));
  const input = el("select", { id, "aria-describedby": `${id}-help` }, ...choices);
  input.value = value;
  input.addEventListener("change", () => onInput(input.value));
  const node = el("div", { class: "setting wide" },
    el("label", { for: id, text: setting.label }), input,
    el("p", { class: "help", id: `${id}-help`, text: setting.help }));
  return { node, input };
}

/** Returns a row of radio buttons that look like one segmented button. */
export function segments(label, choices, value, onInput) {
  const name = unique("segments");
  const node = el("fieldset", { class: "segments" }, el("legend", { text: label }));
  for (const [key, text, icon] of choices) {
    const id = unique("segment");
    const input = el("input", { type: "radio", name, id, value: key });
    input.checked = key === value;
    input.addEventListener("change", () => onInput(key));
    node.append(input, el("label", { for: id }, icon ?? "", text));
  }
  const set = (key) => {
    for (const input of node.querySelectorAll("input")) input.checked = input.value === key;
  };
  return { node, set };
}
