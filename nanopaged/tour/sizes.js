// The calculator of the tour. Its inputs and its formulas come from sizes.json, and a formula
// is evaluated as it stands there: what is shown is what is computed.

"use strict";

(() => {

const root = document.querySelector(".np-sizes");
const {inputs, fractions, defaults, figures, searched, limits, shown, models, gpus} =
  JSON.parse(root.querySelector("script").textContent);
const FIGURES = {...searched, ...figures.fixed, ...figures.step, ...figures.fleet};
const WORDS = /\b[a-z]\w*/g;
const GROUPS = {load: [], model: [], gpu: []};
for (const name of Object.keys(inputs)) {
  const isOfGpu = name in gpus.H100 || name.endsWith("_share") || name === "plan";
  GROUPS[isOfGpu ? "gpu" : name in defaults ? "load" : "model"].push(name);
}

// -- The figures -----------------------------------------------------------------------

const {min, max, floor, ceil} = Math;
const FUNCTIONS = {min, max, floor, ceil, where: (condition, yes, no) => condition ? yes : no};
const calculate = (formula, known) =>
  Number(new Function("functions", "known", `with (functions) with (known) return ${formula}`)(
    FUNCTIONS, known));

function evaluate(given, stage) {
  const known = {...given};
  for (const [name, [, , formula]] of Object.entries(figures[stage])) {
    known[name] = calculate(formula, known);
  }
  return known;
}

// All figures, or an error that says in a sentence which input is wrong.
function compute(given) {
  for (const [name, [text, least, limit]] of Object.entries(inputs)) {
    const isFraction = fractions.includes(name), value = given[name];
    const most = calculate(limit, given);
    if (!(value >= least && value <= most && (isFraction || Number.isInteger(value)))) {
      throw new RangeError(`\u201c${text}\u201d must be a ${isFraction ? "" : "whole "}number from `
        + `${show(least)} to ${show(most)}.`, {cause: name});
    }
  }
  const fixed = evaluate(given, "fixed");
  if (fixed.most < 1) {
    throw new RangeError(`${show(fixed.weights_gb)} GB of weights on each GPU leave no room for a `
      + "chat: take more GPUs a copy, or fewer bits.", {cause: "gpus"});
  }
  const full = evaluate(evaluate({...fixed, running: fixed.most}, "step"), "fleet");
  const step = running => evaluate({...full, running}, "step");
  let least = 1, most = full.most;
  while (least < most) {
    const middle = floor((least + most) / 2);
    if (step(middle).served >= full.load_copy) most = middle; else least = middle + 1;
  }
  return step(least);
}

function show(value) {
  return value.toLocaleString("en", Math.abs(value) >= 100 ? {maximumFractionDigits: 0}
    : {maximumSignificantDigits: 3});
}

// -- The page --------------------------------------------------------------------------

function make(tag, attributes, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

// A figure, which opens into its formula, the formula with numbers, and the figures in it.
function figure(name, known, path = name) {
  const [label, unit, formula] = FIGURES[name];
  const value = name === "limit" ? limits[known.limit] : `${show(known[name])} ${unit}`.trim();
  const opened = make("div", {}, make("code", {}, `${name} = ${formula}`));
  const filled = formula.replace(WORDS, word => word in known ? show(known[word]) : word);
  if (!(name in searched)) opened.append(make("code", {}, `= ${filled}`));
  const head = make("summary", {}, `${label}: `, make("b", {}, value));
  const element = make("details", {open: isOpen.has(path)}, head, opened);
  element.addEventListener("toggle", () => {
    isOpen[element.open ? "add" : "delete"](path);
    if (!element.open || opened.querySelector("details")) return;
    const inner = new Set(formula.match(WORDS).filter(word => word in FIGURES));
    opened.append(...[...inner].map(word => figure(word, known, `${path}/${word}`)));
  });
  return element;
}

const isOpen = new Set();  // by the path of what has been opened, as figures are made anew
const boxes = Object.fromEntries(Object.keys(inputs).map(name =>
  [name, make("input", {type: "number", step: "any", name})]));
const choice = (name, all) => make("select", {name}, ...Object.keys(all).map(one =>
  new Option(one)), new Option("your own", ""));
const model = choice("model", models), gpu = choice("gpu", gpus);
const said = make("p", {role: "status"}), results = make("div", {});
const label = (text, box) => make("label", {}, make("span", {}, text), box);
const labels = names => names.map(name => label(inputs[name][0], boxes[name]));
const fold = (title, names) => make("details", {}, make("summary", {}, title),
  make("div", {className: "np-inputs"}, ...labels(names)));

const fill = values => Object.entries(values).forEach(([name, value]) => {
  boxes[name].value = value;
});

function draw() {
  const given = Object.fromEntries(Object.entries(boxes).map(([name, box]) =>
    [name, box.valueAsNumber]));
  let wrong = null;
  try {
    const known = compute(given);
    results.replaceChildren(...shown.map(name => figure(name, known)));
    said.textContent = "";
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    results.replaceChildren();
    [said.textContent, wrong] = [error.message, error.cause];
  }
  for (const [name, box] of Object.entries(boxes)) box.ariaInvalid = String(name === wrong);
}

const form = make("form", {}, make("div", {className: "np-inputs"}, label("model", model),
  label("GPU", gpu), ...labels(GROUPS.load)), fold("The model, as in its config.json",
  GROUPS.model), fold("The GPU, and what we assume", GROUPS.gpu), said, results);
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", ({target}) => {
  if (target === model && model.value) {
    fill({...Object.fromEntries(GROUPS.model.map(name => [name, 0])), ...models[model.value]});
  } else if (target === gpu && gpu.value) fill(gpus[gpu.value]);
  else if (GROUPS.model.includes(target.name)) model.value = "";
  else if (target.name in gpus.H100) gpu.value = "";
  draw();
});
fill(Object.fromEntries(Object.keys(inputs).map(name => [name, defaults[name] ?? 0])));
[model.value, gpu.value] = [defaults.model, defaults.gpu];
fill({...models[model.value], ...gpus[gpu.value]});
draw();
root.append(form);
globalThis.npSizes = compute;  // for tests

})();
