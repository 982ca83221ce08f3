// The calculator of the tour: its inputs and formulas come from sizes.json.
//
// A formula is evaluated as it stands there, so what is shown is what is computed. All text
// is put in as text nodes.

"use strict";

(() => {

const FUNCTIONS = {...Math, where: (condition, yes, no) => condition ? yes : no};
const WORDS = /[a-z]\w*/g;
const place = document.querySelector(".np-sizes");
const {inputs, fractions, defaults, figures, searched, limits, shown, models, gpus} = JSON.parse(
  place.querySelector("script").textContent);
const all = {...searched, ...figures.fixed, ...figures.step, ...figures.fleet};
const MODEL = Object.keys(inputs).slice(0, Object.keys(inputs).indexOf("memory_gb"));
const GPU = Object.keys(gpus.H100);
const SHARES = Object.keys(inputs).filter(name => name.endsWith("_share") || name === "plan");
const LOAD = Object.keys(inputs).filter(name => ![...MODEL, ...GPU, ...SHARES].includes(name));

// -- The figures -----------------------------------------------------------------------

// A function's body has no strict mode unless it asks for it, so it may say "with".
const compiled = new Map(Object.entries(all).map(([name, [, , formula]]) =>
  [name, name in searched ? null : new Function("known", `with (known) return ${formula}`)]));

function evaluate(known, stage) {
  const values = {...known};
  for (const name of Object.keys(figures[stage])) {
    values[name] = compiled.get(name)(Object.assign(Object.create(SCOPE), values));
  }
  return values;
}

const SCOPE = Object.fromEntries(["min", "max", "floor", "ceil"].map(name => [name, Math[name]]));
SCOPE.where = FUNCTIONS.where;
