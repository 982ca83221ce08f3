// Plays traces of the engine: each <section class="np-player"> holds one.
//
// The page knows no rule of the engine. A trace has the engine's state at every frame, and
// the page draws it. What happened comes with the trace. NP_KINDS says which line of the
// source did it. All text is put in as text nodes, so nothing in a prompt can become markup.

"use strict";

(() => {

const PAPER = "https://arxiv.org/abs/2309.06180";
const MOST_GROUPS = 8;        // requests that are drawn until the reader asks for more
const MOST_LARGE_CELLS = 64;  // of a pool; beyond that, cells are small and have no text
const MOST_TOKENS = 120;      // of one sequence that are drawn
const NUM_HUES = 6;
const FRAME_MS = 900;
const HIDDEN_HERE = {"aria-hidden": "true"};   // what is hidden beside it says the same
const MOTION_MS = 500;
const MOVES = ["copy", "swap_out", "swap_in"];   // events that name blocks: from, to, ...
const PHASES = {
  start: ["before the run", "The state when the recording began."],
  begin: ["between steps", "Requests come and go before the next step is scheduled."],
  scheduled: ["scheduled", "Tokens and blocks are assigned. The forward pass comes next."],
  updated: ["updated", "The forward pass is done, and the sampled tokens are appended."],
  end: ["after the run", "The state when the recording ended."],
};
// The lines of the timeline, and the kinds of events that get a tick there.
const TICKS = {
  prefix: ["prefix"], fork: ["fork"], copy: ["copy"], beams: ["beam"],
  preemption: ["recompute", "swap_out"], "swap in": ["swap_in"], end: ["finish"],
  abort: ["abort"],
};
const ICONS = {
  first: "M3 3h2v10H3zM13 3v10L6 8z", back: "M11 3v10L4 8z", play: "M4 2v12l9-6z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z", next: "M5 3v10l7-5z",
};


// -- Small things ----------------------------------------------------------------------

const groupOf = key => key.split(".")[0];
const hue = group => `np-hue${Number(group) % NUM_HUES}`;
const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// Characters that cannot be seen, or that change the direction of what follows, by code.
const HIDDEN = new RegExp("[\\u0000-\\u0009\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200b\\u200e"
  + "\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff\\ud800-\\udfff]", "gu");

function visible(text) {
  const code = character => character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return text.replace(HIDDEN, character => `\u2039U+${code(character)}\u203a`).replaceAll("\n", "\u21b5");
}

// h("p.note", {title: "x"}, "text", ...) is <p class="note" title="x">text...</p>. Null is
// left out.
function h(selector, ...rest) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  if (tag === "button") element.type = "button";
  const hasAttributes = rest[0]?.constructor === Object;
  for (const [name, value] of Object.entries(hasAttributes ? rest.shift() : {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") classes.push(value);
    else element.setAttribute(name, value);
  }
  if (classes.length > 0) element.className = classes.join(" ");
  element.append(...rest.flat().filter(child => child !== null));
  return element;
}

// Children of an <svg> that only decorates: paths, {class, d}.
function drawing(viewBox, paths, attributes = {}) {
  const make = (tag, all) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(all)) element.setAttribute(name, value);
    return element;
  };
  const svg = make("svg", {viewBox, "aria-hidden": "true", ...attributes});
  svg.append(...paths.map(path => make("path", path)));
  return svg;
}

const icon = name => drawing("0 0 16 16", [{d: ICONS[name]}]);

// The lines of a trace: a state for each frame, and then all else.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return (await new Response(stream).text()).split("\n");
}


// -- What a state means ----------------------------------------------------------------

// Everything that is looked up while one frame is drawn.
class View {
  constructor(trace, state) {
    Object.assign(this, trace, state);
    this.owners = new Map();   // block -> [{key, index}], from the block tables
    for (const [key, {table}] of Object.entries(this.seqs)) {
      table.forEach((block, index) => {
        if (!this.owners.has(block)) this.owners.set(block, []);
        this.owners.get(block).push({key, index});
      });
    }
  }

  ownersOf(block) { return this.owners.get(block) ?? []; }

  sequencesOf(group) {
    return Object.keys(this.seqs).filter(key => groupOf(key) === group);
  }

  // The texts of all tokens of a sequence, the prompt's first.
  tokens(key) { return [...this.groups[groupOf(key)].prompt, ...this.seqs[key].tokens]; }

  // How many slots of logical block `index` hold a token, and how many of those are new.
  slots(key, index) {
    const {computed, now} = this.seqs[key];
    const inBlock = count => Math.max(0, Math.min(this.block_size, count - index * this.block_size));
    const filled = inBlock(computed);
    return {filled, fresh: filled - inBlock(computed - now)};
  }

  // The same for a physical block: of its owners, one may have filled more than others.
  filled(block) {
    return Math.max(0, ...this.ownersOf(block).map(({key, index}) => this.slots(key, index).filled));
  }

  // The texts in a block. "?" stands for a token that only the device knows yet.
  content(block) {
    const [owner] = this.ownersOf(block);
    if (!owner) return this.blocks[block]?.tokens ?? [];
    const first = owner.index * this.block_size;
    return Array.from({length: this.slots(owner.key, owner.index).filled},
      (_, slot) => this.tokens(owner.key)[first + slot] ?? "?");
  }

  refs(block) { return this.blocks[block]?.refs ?? 0; }

  isOnDevice(block) { return block < this.num_blocks; }
}


// What tells two runs apart at a step.
function facts(trace, {seqs, running, waiting, total}) {
  const used = new Set(Object.values(seqs).flatMap(
    ({table}) => table.filter(block => block < trace.num_blocks)));
  const names = groups => groups.map(group => `request ${group}`).join(", ") || "nobody";
  return {"tokens of this step:": total, "slots in use:": used.size * trace.block_size,
    "running:": names(running), "waiting:": names(waiting)};
}


// -- The player ------------------------------------------------------------------------

class Player {
  // runs: the same requests under one or several settings, [{setting, trace, states}].
  constructor(root, runs, isAlone, isTwin = false) {
    Object.assign(this, {root, runs, isAlone, isTwin, limit: MOST_GROUPS, timer: null, lit: null, speed: 1});
    this.answers = new Map();   // frame -> the choice that was made
    this.use(runs[0]);
    this.listen();
    this.show(this.frameOfLink() ?? this.findOpening());
    addEventListener("hashchange", () => {
      const frame = this.frameOfLink();
      if (frame === null) return;
      this.go(frame);   // which also makes the address longer, so the same link leads here again
      this.reveal("smooth");
    });
  }

  // Draw this run from now on.
  use(run) {
    Object.assign(this, {run, trace: run.trace, twin: null});
    this.states = run.states;
    this.cells = this.findCells();
    this.root.replaceChildren();
    this.root.classList.remove("np-both");
    this.build();
  }

  // Go to the same step under another setting, or to the end if it ended before.
  switchTo(run) {
    const {step, phase} = this.trace.frames[this.frame];
    this.pause();
    this.use(run);
    this.go(this.frameOf(`${step}-${phase}`) ?? this.last);
    this.root.querySelector(".np-setting[aria-pressed=true]").focus();
  }

  // Bring the player onto the screen, and let keys act on it.
  reveal(behavior) {
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.root.scrollIntoView({behavior: isCalm ? "instant" : behavior});
    this.root.focus({preventScroll: true});
  }

  state(frame) { return JSON.parse(this.states[frame]); }

  // The step that the page asks for, or the first one, or a question before that step.
  findOpening() {
    const first = this.trace.frames.findIndex(({phase}) => phase === "scheduled");
    const asked = this.trace.questions.map(({frame}) => frame).filter(frame => frame < first);
    return this.frameOf(this.root.dataset.opensAt) ?? Math.max(0, Math.min(first, ...asked));
  }

  get last() { return this.trace.frames.length - 1; }

  // The blocks that get a cell: all of a small pool, and of a large one those in use. And
  // how many tokens each answer has in the end.
  findCells() {
    const touched = new Set();
    this.lengths = {};
    for (const line of this.states) {
      const {blocks, seqs} = JSON.parse(line);
      for (const block of Object.keys(blocks)) touched.add(Number(block));
      for (const [key, {tokens}] of Object.entries(seqs)) this.lengths[key] = tokens.length;
    }
    const {num_blocks: device, num_swap_blocks: swap} = this.trace;
    const used = [...touched].sort((a, b) => a - b);
    const all = Array.from({length: device}, (_, block) => block);
    return {device: device <= MOST_LARGE_CELLS ? all : used.filter(block => block < device),
      swap: swap > 0 ? used.filter(block => block >= device) : []};
  }

  // -- What stays the same in all frames

  build() {
    this.where = h("p.np-where");
    this.live = h("p.np-hidden", {"aria-live": "polite"});
    this.question = h("div.np-ask", {role: "group", "aria-label": "A question"});
    this.detail = h("p.np-detail");
    this.panels = {};
    this.sentences = h("ol.np-sentences");
    this.source = h("details.np-source", {"aria-label": "Source of what happened"});
    this.source.open = !matchMedia("(max-width: 900px)").matches;
    this.root.append(
      h("header.np-head",
        h("div.np-top",
          h("p.np-title", {role: "heading", "aria-level": this.isAlone ? "1" : "3"},
            visible(this.runs[0].trace.title)), this.where),
        this.settings(), this.leftOut(), this.controls(), this.timeline(), this.question),
      h("div.np-main", this.panel("requests", "Requests"), this.panel("tables", `Block tables${this.isTwin ? `: ${this.run.setting}` : ""}`),
        this.panel("pools", "Physical blocks", this.detail)),
      h("div.np-story", {role: "group", "aria-label": "What happened"}, this.sentences, this.source),
      this.live);
  }

  listen() {
    // A click anywhere in the player gives it the focus, or something in it.
    this.root.tabIndex = -1;
    this.root.addEventListener("keydown", event => this.onKey(event));
    if (this.isAlone) {
      document.addEventListener("keydown", event => {
        if (!this.root.contains(event.target)) this.onKey(event);
      });
    }
    for (const name of ["pointermove", "focusin", "click"]) {
      this.root.addEventListener(name, event =>
        this.light(event.target.closest("[data-block]")?.dataset.block ?? null));
    }
    this.root.addEventListener("pointerleave", () => this.light(null));
  }

  panel(name, title, ...below) {
    const id = `${this.root.id}-${name}`;
    const [note, body] = this.panels[name] = [h("p.np-note"), h("div.np-list")];
    return h("div", {class: `np-panel np-${name}`, role: "group", "aria-labelledby": id,
      tabindex: "0"},
      h("div.np-heading", h("h3", {id}, title), note), body, ...below);
  }

  fill(name, note, elements) {
    this.panels[name][0].replaceChildren(...[note].flat());
    this.panels[name][1].replaceChildren(...elements.flat().filter(element => element !== null));
  }

  leftOut() {
    const count = this.trace.left_out;
    return count === 0 ? null : h("p.np-note",
      `This run was long, so its last ${plural(count, "phase")} have no frames, except the end.`);
  }

  // What one can switch between, and how this setting differs from the first one.
  settings() {
    this.difference = h("p.np-note", {"aria-live": "polite"});
    this.twinButton = h("button.np-setting.np-compare", {"aria-pressed": "false",
      onclick: () => this.toggleTwin()}, "side by side");
    return this.runs.length === 1 ? null : [h("div.np-settings", {role: "group",
      "aria-label": "The same requests under other settings"}, "What if: ",
      this.runs.map(run => h("button.np-setting", {"aria-pressed": String(run === this.run),
        onclick: () => this.switchTo(run)}, run.setting)),
      this.twinButton), this.difference];
  }

  // Show another run beside this one, and let it follow; or no longer.
  toggleTwin() {
    const root = this.twin?.root ?? h("section.np-player.np-twin",
      {id: `${this.root.id}-twin`, "data-opens-at": ""});
    const [first, second] = this.runs;
    const isShown = this.root.classList.toggle("np-both");
    this.twinButton.setAttribute("aria-pressed", String(isShown));
    if (isShown) {
      this.root.querySelector(".np-main").append(root);
      this.twin = new Player(root, [this.run === first ? second : first], false, true);
      this.show(this.frame);
    } else {
      root.remove();
      this.twin = null;
    }
  }

  // At the same step: what the first run has, too, and, marked, what it has not.
  drawDifference() {
    const [first] = this.runs;
    if (this.run === first) return;
    const {step, phase} = this.trace.frames[this.frame];
    const other = first.trace.frames.findIndex(
      frame => frame.step === step && frame.phase === phase);
    const then = other < 0 ? {} : facts(first.trace, JSON.parse(first.states[other]));
    const now = facts(this.trace, this.state(this.frame));
    const parts = Object.entries(now).map(([name, value]) => [`${name} `,
      value === then[name] ? `${value}` : h("mark", `${value}`),
      value === then[name] ? "; " : ` (${first.setting}: ${then[name] ?? "over"}); `]);
    this.difference.replaceChildren(...parts.flat(),
      `steps in all: ${this.trace.frames[this.last].step} (${first.setting}: ${first.trace.frames.at(-1).step})`);
  }

  controls() {
    const button = (name, label, onclick) =>
      h("button.np-button", {"aria-label": label, title: label, onclick}, icon(name));
    this.playButton = button("play", "Play (space)", () => this.toggle());
    const legend = this.ticks().map(([name, frames, hue]) => h("button", {
      class: `np-key ${hue}`, title: `Go to the next: ${name}`,
      onclick: () => this.go(frames.find(frame => frame > this.frame) ?? frames[0])},
      h("i"), `${name} ${frames.length}`));
    return h("div.np-controls",
      button("first", "First frame (Home)", () => this.go(0)),
      button("back", "Back (left arrow)", () => this.go(this.frame - 1)),
      this.playButton,
      button("next", "Next (right arrow)", () => this.go(this.frame + 1)),
      this.loop = h("p.np-loop", {"aria-hidden": "true"}),
      h("div.np-legend", {role: "group", "aria-label": "Go to the next"}, legend),
      h("p.np-keys", `${this.isAlone ? "Keys" : "Click here, then"}: \u2190 \u2192 step, space `
        + "plays, Home and End go to the ends, \u2191 \u2193 go from block to block"));
  }

  // For every line of the timeline that has ticks: a frame for each event.
  ticks() {
    const all = Object.entries(TICKS).map(([name, kinds], line) => [name,
      this.trace.frames.flatMap(({events}, frame) =>
        events.filter(([kind]) => kinds.includes(kind)).map(() => frame)), `np-tick${line}`]);
    return all.filter(([, found]) => found.length > 0);
  }

  timeline() {
    this.slider = h("input", {type: "range", min: 0, max: this.last, value: 0,
      "aria-label": "Frame", oninput: () => this.go(Number(this.slider.value))});
    const paths = this.ticks().map(([, frames, hue], line) => ({
      class: hue, d: frames.map(frame => `M${frame} ${line * 4}v3`).join("")}));
    const height = 4 * paths.length;
    return h("div.np-timeline", this.slider, drawing(
      `0 0 ${Math.max(1, this.last)} ${height}`, paths,
      {class: `np-ticks ${this.last < 250 ? "np-broad" : ""}`, style: `height: ${height}px`,
        preserveAspectRatio: "none"}));
  }

  // -- Going from frame to frame

  go(frame) {
    this.pause();
    this.show(Math.max(0, Math.min(this.last, frame)));
    if (matchMedia("(max-width: 900px)").matches) this.root.scrollIntoView();
    this.narrate();
    this.link();
  }

  toggle() {
    if (this.timer !== null) {
      this.pause();
      this.link();
      return;
    }
    if (this.frame === this.last) this.show(0);
    this.setPlayButton("pause", "Pause (space)");
    this.tick();
  }

  // Play the next frame after a while, up to the end or a question.
  tick() {
    this.timer = setTimeout(() => {
      this.show(this.frame + 1);
      this.narrate();
      if (this.frame < this.last && !this.isAsking) this.tick();
      else this.pause();
    }, FRAME_MS / this.speed);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.setPlayButton("play", "Play (space)");
  }

  setPlayButton(name, label) {
    this.playButton.replaceChildren(icon(name));
    this.playButton.title = label;
    this.playButton.setAttribute("aria-label", label);
  }

  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const block = event.target.closest("[data-block]");
    const blocks = [...block?.parentNode.querySelectorAll("[data-block]") ?? []];
    const focus = by => blocks[blocks.indexOf(block) + by]?.focus();   // in a pool, or a table
    const action = {
      ArrowLeft: () => this.go(this.frame - 1),
      ArrowRight: () => this.go(this.frame + 1),
      Home: () => this.go(0),
      End: () => this.go(this.last),
      " ": /BUTTON|SUMMARY/.test(event.target.tagName) ? null : () => this.toggle(),
      ArrowUp: block && (() => focus(-1)),
      ArrowDown: block && (() => focus(1)),
    }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // "#step=7" is the first frame of step 7, "#step=7-updated" the one after its update, and
  // "#step=7-updated-2" that of run 2, under another setting.
  frameOfLink() {
    const [id, place = ""] = location.hash.slice(1).split("=");
    if (id !== this.root.id) return null;
    const run = this.runs[place.split("-")[2] ?? 0] ?? this.run;
    if (run !== this.run) this.use(run);
    return this.frameOf(place);
  }

  // "7" or "7-updated" -> the number of the frame, or null. ("" has no frame: no step 0 is scheduled.)
  frameOf(place) {
    const [number, wanted = "scheduled"] = place.split("-");
    const found = this.trace.frames.findIndex(({step, phase}) =>
      step === Number(number) && phase === wanted);
    return found >= 0 ? found : null;
  }

  link() {
    const {step, phase} = this.trace.frames[this.frame];
    const run = this.runs.indexOf(this.run);
    try {
      history.replaceState(null, "", `#${this.root.id}=${step}-${phase}${run ? `-${run}` : ""}`);
    } catch {
      // A frame in a notebook has no address of its own.
    }
  }

  // Tell a screen reader what has happened.
  narrate() {
    const {step, phase, events} = this.trace.frames[this.frame];
    const sentences = events.map(([, sentence]) =>
      sentence.replace(/[#@]/g, match => match === "#" ? "block " : "sequence "));
    this.live.textContent = [`Step ${step}, ${PHASES[phase][0]}.`, ...sentences].join(" ");
  }

  // -- Drawing a frame

  show(frame) {
    const focused = this.root.contains(document.activeElement) ? document.activeElement : null;
    const panel = focused?.closest(".np-panel")?.classList[1];
    const before = frame === this.frame + 1 ? this.view : null;
    this.frame = frame;
    this.view = new View(this.trace, this.state(frame));
    const {step, phase} = this.trace.frames[frame];
    const [label, meaning] = PHASES[phase];
    this.twin?.show(this.twin.frameOf(`${step}-${phase}`) ?? this.twin.last);
    this.slider.value = frame;
    this.slider.setAttribute("aria-valuetext", `step ${step}, ${label}`);
    this.where.replaceChildren(
      h("strong", `Step ${step}`), ` of ${this.trace.frames[this.last].step} \u00b7 `,
      h("em", label), h("span", meaning));
    this.loop.replaceChildren(...["schedule", "execute", "update"].map(part =>
      h("code", {class: phase === `${part}d` ? "np-current" : ""}, part)));
    this.drawQuestion();
    this.drawDifference();
    this.drawRequests();
    this.drawTables();
    this.drawPools();
    this.drawStory();
    if (this.lit !== null) this.mark(this.lit);
    if (before) this.animate(before);
    // What had the focus may have been drawn anew.
    if (focused && !focused.isConnected) {
      const block = focused.dataset.block;
      const same = block && this.root.querySelector(`.${panel} [data-block="${block}"]`);
      (same || this.root).focus({preventScroll: true});
    }
  }

  // After a step forward: blocks that were copied slide from where they were, those that
  // were taken or found grow, and those that were freed fade.
  animate(before) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const cells = new Map([...this.root.querySelectorAll(".np-cell")].map(
      cell => [Number(cell.dataset.block), cell]));
    const play = (cell, ...frames) => cell?.animate(frames, {duration: MOTION_MS, easing: "ease"});
    for (const [kind, sentence] of this.trace.frames[this.frame].events) {
      const named = MOVES.includes(kind) ? sentence.match(/#\d+/g) ?? [] : [];
      while (named.length > 1) {
        const [from, to] = named.splice(0, 2).map(name => cells.get(Number(name.slice(1))));
        if (!from || !to) continue;
        const [old, now] = [from.getBoundingClientRect(), to.getBoundingClientRect()];
        play(to, {transform: `translate(${old.x - now.x}px, ${old.y - now.y}px)`, zIndex: 2},
          {transform: "none", zIndex: 2});
      }
    }
    for (const [block, cell] of cells) {
      const [then, now] = [before.refs(block), this.view.refs(block)];
      if (now > then && cell.getAnimations().length === 0) play(cell, {scale: 0.6}, {scale: 1});
      if (now === 0 && then > 0) play(cell, {opacity: 0.1}, {opacity: 1});
    }
  }

  // Before some steps the reader is asked what will happen. The next frame is the answer.
  drawQuestion() {
    const asked = this.trace.questions.find(({frame}) => frame === this.frame);
    this.isAsking = asked !== undefined && !this.answers.has(this.frame);
    this.question.replaceChildren();
    if (!asked) return;
    const answer = this.answers.get(this.frame);
    const buttons = asked.choices.map(([choice], index) => h("button", {
      class: answer === undefined ? "" : index === asked.right ? "np-right"
        : index === answer ? "np-wrong" : "",
      onclick: () => {
        this.answers.set(this.frame, index);
        this.drawQuestion();
        countAnswers();
        this.root.focus({preventScroll: true});
      }}, choice));
    const verdicts = asked.choices.map(([, reason], index) =>
      `${index === asked.right ? "Yes." : "Not quite."} ${reason} Go to the next step to see it.`);
    const longest = verdicts.reduce((best, text) => text.length > best.length ? text : best);
    // The longest verdict has its room from the start, so nothing moves when one answers.
    this.question.append(
      h("p", h("strong", "Predict: "), asked.text), h("div", buttons),
      h("p.np-verdict", {"data-room": longest}, h("span", {"aria-live": "polite"},
        verdicts[answer] ?? "Choose, or go to the next step and see.")));
  }

  drawRequests() {
    const {running, waiting, finished, seqs, budget, total} = this.view;
    const parts = Object.entries(seqs).filter(([, seq]) => seq.now > 0);
    const bar = parts.map(([key, {now}]) => h("i",
      {class: hue(groupOf(key)), style: `flex-grow: ${now}`}, now / budget > 0.07 ? key : ""));
    const queues = [["Running", running], ["Waiting", waiting], ["Finished", finished]];
    this.fill("requests", `${total} of ${plural(budget, "token")} of the step\u2019s budget`, [
      h("div.np-bar", {"aria-hidden": "true"}, total === 0 ? null
        : h("span", {style: `width: ${100 * total / budget}%`}, bar)),
      ...queues.map(([name, groups]) => name === "Finished" && groups.length === 0 ? null : [
        h("h4", name, h("span.np-count", groups.length.toLocaleString("en"))),
        ...groups.slice(0, this.limit).map(group => this.request(group, name === "Finished")),
        this.more(groups.length)]).flat(),
      h("p.np-text.np-howto", h("span.np-done", "computed"), " ",
        h("span.np-now", "by this step"), " ", h("span.np-todo", "not yet")),
    ]);
  }

  // A button that draws more of a long queue.
  more(count) {
    return count <= this.limit ? null : h("button.np-more", {onclick: () => {
      this.limit += MOST_GROUPS;
      this.show(this.frame);
    }}, `Show more: ${plural(count - this.limit, "request")} not drawn`);
  }

  request(group, isOver) {
    const {seqs, groups, view = this.view} = this.view;
    const {kind, prompt} = groups[group];
    const keys = view.sequencesOf(group);
    const isSwapped = keys.some(key => seqs[key].table.some(block => !view.isOnDevice(block)));
    const leader = keys.reduce((best, key) => seqs[key].computed > seqs[best].computed ? key : best);
    return h("article.np-request", {class: `${hue(group)} ${isOver ? "np-over" : ""}`},
      h("p.np-name", h("strong", `Request ${group}`), ` ${kind}`,
        isSwapped ? h("span.np-badge", "swapped out") : null),
      h("p.np-text", this.text(leader, 0, prompt.length, isOver)),
      keys.map(key => {
        const {tokens, computed, end, score} = seqs[key];
        const last = Math.max(prompt.length + tokens.length, computed);
        return last === prompt.length && !end ? null : h("p.np-text.np-own",
          h("b", {"data-seq": key}, key), " ",
          this.text(key, prompt.length, last, isOver || end !== ""),
          score === undefined ? null : h("span.np-badge", {title: "log-probability"}, score.toFixed(2)),
          end ? h("span.np-badge", end) : null);
      }));
  }

  // Tokens `first` to `last` of a sequence. Neighbours that look the same are one element.
  // Of a long text only the part around the newest tokens is drawn.
  text(key, first, last, isOver) {
    const {computed, now} = this.view.seqs[key];
    const tokens = this.view.tokens(key);
    const end = Math.min(last, Math.max(computed + 24, first + MOST_TOKENS));
    const start = Math.max(first, end - MOST_TOKENS);
    const pieces = [];
    for (let index = start; index < end; index += 1) {
      const kind = isOver || index < computed - now ? "done" : index < computed ? "now" : "todo";
      const text = visible(tokens[index] ?? "?");
      if (pieces.at(-1)?.[0] === kind) pieces.at(-1)[1] += text;
      else pieces.push([kind, text]);
    }
    if (start > first) pieces.unshift(["elided", `${start - first} tokens \u2026 `]);
    if (end < last) pieces.push(["elided", ` \u2026 ${last - end} tokens`]);
    return pieces.map(([kind, text]) => h("bdi", {class: `np-${kind}`}, text));
  }

  drawTables() {
    const {running, waiting, seqs} = this.view;
    const groups = [...running, ...waiting].filter(group =>
      this.view.sequencesOf(group).some(key => seqs[key].table.length > 0));
    const drawn = new Set();   // a block is drawn with its tokens once, and small after that
    const legend = [h("i.np-now", "this step"), " ", h("i.np-empty", "empty"), " ",
      h("i.np-above", "drawn above")];
    this.fill("tables", legend, [
      groups.length === 0 ? h("p.np-note", "No sequence holds a block.") : null,
      ...groups.slice(0, this.limit).map(group => {
        const keys = this.view.sequencesOf(group).filter(key => seqs[key].table.length > 0);
        return h("article", {class: `np-tablegroup ${hue(group)}`}, this.waste(group, keys),
          keys.map(key => this.table(key, drawn)));
      }),
      this.more(groups.length),
    ]);
  }

  // What a request holds, and what contiguous memory would have reserved for it: room for
  // the longest answers; for their lengths rounded up to a power of two; for their lengths.
  waste(group, keys) {
    const held = new Set(keys.flatMap(key => this.view.seqs[key].table));
    const tokens = [...held].reduce((sum, block) => sum + this.view.filled(block), 0);
    const slots = held.size * this.view.block_size;
    const {reserved: max, prompt} = this.view.groups[group];
    const answers = Object.keys(this.lengths).filter(key => groupOf(key) === group);
    const reserve = round => Math.min(max, answers.reduce(
      (sum, key) => sum + prompt.length + round(this.lengths[key]), 0));
    const oracle = reserve(length => length);
    const pow2 = reserve(length => 2 ** Math.ceil(Math.log2(length)));
    const share = count => `${100 * count / Math.max(max, slots)}%`;
    const guesses = oracle === max ? max : `${max} (max), ${pow2} (pow2), ${oracle} (oracle)`;
    const part = (name, count) => h("i", {class: name, style: `flex: 0 0 ${share(count)}`});
    return h("div.np-waste",
      h("div.np-heading.np-name", h("strong", `Request ${group}`),
        h("p.np-note", {title: "Room for the longest answers; for powers of two; for the true lengths"},
          `${plural(tokens, "token")} in ${plural(slots, "slot")}. Contiguous: ${guesses}`)),
      h("div.np-strip", {"aria-hidden": "true"},
        part("np-held", tokens), part("np-rest", slots - tokens),
        [oracle, pow2].map(count => h("i.np-guess", {style: `left: ${share(count)}`}))));
  }

  // One line: the logical blocks of a sequence.
  table(key, drawn) {
    return h("div.np-table", {role: "group", "aria-label": `Block table of sequence ${key}`},
      h("b", {"data-seq": key}, key),
      this.view.seqs[key].table.map((block, index) => {
        const isSmall = drawn.has(block);
        drawn.add(block);
        return this.entry(key, index, block, isSmall);
      }));
  }

  entry(key, index, block, isSmall) {
    const {filled, fresh} = this.view.slots(key, index);
    const refs = this.view.refs(block);
    const label = `logical block ${index}, physical block ${block}, `
      + `${filled} of ${this.view.block_size} slots filled, ${plural(refs, "reference")}`;
    return h("button", {class: `np-entry ${isSmall ? "np-small-entry" : ""}`, "data-block": block,
      tabindex: index === 0 ? 0 : -1}, h("span.np-hidden", label),
      h("span.np-id", HIDDEN_HERE, `#${block}`, refs > 1 ? h("small", `\u00d7${refs}`) : null),
      isSmall ? null : this.slotBar(key, index, filled, fresh));
  }

  // The slots of a block: with a token in each, if they are few.
  slotBar(key, index, filled, fresh) {
    const size = this.view.block_size;
    const tokens = this.view.tokens(key).slice(index * size, index * size + filled).map(visible);
    if (size > 4) {
      return h("span.np-slots", {"aria-hidden": "true"},
        h("bdi.np-slottext", tokens.join("")), this.meter(filled, fresh));
    }
    return h("span.np-slots.np-wide", {"aria-hidden": "true"},
      Array.from({length: size}, (_, slot) => slot >= filled ? h("i.np-empty")
        : h(slot >= filled - fresh ? "i.np-now" : "i.np-done",
          (tokens[slot] ?? "?").replace(/^ /, "\u00b7"))));
  }

  meter(filled, fresh) {
    const size = this.view.block_size;
    const parts = [["np-done", filled - fresh], ["np-now", fresh], ["np-empty", size - filled]];
    return h("span.np-meter", {style: `--size: ${size}`, "aria-hidden": "true"},
      parts.filter(([, count]) => count > 0).map(([name, count]) =>
        h("i", {class: name, style: `flex-grow: ${count}`})));
  }

  drawPools() {
    const {view} = this;
    const used = [...view.owners.keys()].filter(block => view.isOnDevice(block));
    const tokens = used.reduce((sum, block) => sum + view.filled(block), 0);
    const percent = Math.round(100 * tokens / (used.length * view.block_size));
    this.fill("pools", `${used.length} of ${plural(view.num_blocks, "block")} in use`
      + (used.length === 0 ? "" : `, ${percent}% filled`), [
      ...this.pool("Device pool", this.cells.device, view.num_blocks),
      Object.values(view.blocks).some(({rank}) => rank) ? h("p.np-note",
        "Hatched: free, but still cached. The number is its place in the queue of blocks to be taken.") : null,
      ...view.num_swap_blocks === 0 ? [] : [h("h4", "CPU pool"),
        ...this.pool("CPU pool", this.cells.swap, view.num_swap_blocks)]]);
  }

  pool(name, blocks, total) {
    const isLarge = blocks.length <= MOST_LARGE_CELLS;
    const count = total - blocks.length;
    return [
      h("div.np-pool", {class: isLarge ? "np-large" : "np-small", role: "group", "aria-label": name},
        blocks.map((block, index) => this.cell(block, isLarge, index === 0 ? 0 : -1))),
      count === 0 ? null : h("p.np-note", `${plural(count, "block")} that this run never uses `
        + `${count === 1 ? "is" : "are"} not drawn.`)];
  }

  // A small cell shows whose a block is. A large one also shows what is in it.
  cell(block, isLarge, tabindex) {
    const refs = this.view.refs(block);
    const keys = this.view.ownersOf(block).map(({key}) => key);
    const rank = this.view.blocks[block]?.rank;
    let name = rank ? "np-cached" : "np-free";
    let state = rank ? "free and cached" : "free";
    if (refs > 0) {
      name = `np-used ${hue(groupOf(keys[0] ?? "0"))}`;
      state = plural(refs, "reference");
      if (keys.some(key => groupOf(key) !== groupOf(keys[0]))) name += " np-mixed";
    }
    const badge = refs > 0 ? `\u00d7${refs}` : rank ? `${rank}.` : "";
    return h("button.np-cell", {class: name, "data-block": block, "data-refs": refs, tabindex},
      h("span.np-hidden", `block ${block}, ${state}`),
      !isLarge ? null : h("span.np-in", HIDDEN_HERE,
        h("span.np-id", `${block}`, badge ? h("small", badge) : null),
        h("bdi.np-celltext", visible(this.view.content(block).join(""))),
        h("span.np-owners", keys.length > 2 ? `${keys[0]} +${keys.length - 1}` : keys.join(" ")),
        refs > 0 ? this.meter(this.view.filled(block), 0) : null));
  }

  // One block, in words.
  describe(block) {
    const {refs = 0, cached, rank} = this.view.blocks[block] ?? {};
    const name = `${this.view.isOnDevice(block) ? "Block" : "CPU block"} ${block}`;
    const text = visible(this.view.content(block).join(""));
    const quoted = text ? ` It holds \u201c${text}\u201d.` : "";
    if (rank) return `${name}: free and still cached, number ${rank} of those to be taken.${quoted}`;
    if (refs === 0) return `${name}: free.`;
    const owners = this.view.ownersOf(block).map(({key}) => key).join(", ");
    return `${name}: ${plural(refs, "reference")}, from ${owners}; ${this.view.filled(block)} of `
      + `${this.view.block_size} slots filled.${cached ? " Others can find it." : ""}${quoted}`;
  }

  drawStory() {
    const {events} = this.trace.frames[this.frame];
    this.sentences.replaceChildren(...events.map(([kind, sentence], index) =>
      h("li.np-event",
        h("button.np-kind", {onclick: () => this.choose(index)}, NP_KINDS[kind].label),
        h("span", this.sentence(sentence)))));
    if (events.length === 0) this.sentences.append(h("li", h("span", "Nothing happens here.")));
    const kinds = events.map(([kind]) => kind);
    const notable = kinds.find(kind => !NP_KINDS[kind].minor)
      ?? kinds.find(kind => kind !== "compute") ?? "compute";
    this.choose(Math.max(0, kinds.indexOf(notable)));
  }

  // "#5" and "@0.1" in a sentence are a block and a sequence.
  sentence(text) {
    return text.split(/(#\d+|@\d+\.\d+)/).map(part => {
      const name = part.slice(1);
      if (part.startsWith("#")) return h("span.np-mark", {"data-block": name}, part);
      if (part.startsWith("@")) return h("b", {class: hue(groupOf(name)), "data-seq": name}, name);
      return part;
    });
  }

  // Show the source of one of the events.
  choose(index) {
    const kind = this.trace.frames[this.frame].events[index]?.[0] ?? "compute";
    [...this.sentences.children].forEach((item, at) => {
      item.classList.toggle("np-chosen", at === index);
      item.querySelector("button")?.setAttribute("aria-pressed", String(at === index));
    });
    const {file, name, lines, at, paper} = NP_KINDS[kind];
    this.source.replaceChildren(
      h("summary.np-file", h("code", name), h("span", file)),
      h("pre", {tabindex: "0"}, h("code", lines.map((line, number) =>
        h(number === at ? "mark" : "span", `${line}\n`)))),
      h("p.np-paper", /^\d/.test(paper)
        ? [h("a", {href: PAPER, rel: "noreferrer"}, "The paper"), `, section ${paper}`] : paper));
    const [marked, box] = [this.source.querySelector("mark"), this.source.querySelector("pre")];
    // Show the function from its head, or as much of it above the marked line as fits.
    const below = marked.getBoundingClientRect().bottom - box.getBoundingClientRect().bottom;
    box.scrollTop += Math.max(0, below + 32);   // two more lines
  }

  // -- One block, wherever it is drawn

  light(block) {
    if (block !== this.lit) this.mark(this.lit = block);
  }

  mark(block) {
    for (const element of this.root.querySelectorAll("[data-block]")) {
      element.classList.toggle("np-lit", element.dataset.block === block);
    }
    this.detail.textContent = block === null ? "" : this.describe(Number(block));
  }
}

// -- Attention, one block after another ------------------------------------------------

// One query over the blocks of its sequence, as in `run_program`. The numbers are real.
class Softmax {
  constructor(root) {
    this.root = root;
    Object.assign(this, JSON.parse(root.querySelector("script").textContent));
    this.order = [...this.blocks.keys()];
    this.numDone = 0;
    this.extra = 0;   // what is added to one score
    const button = (text, action) => h("button.np-setting", {onclick: () => {
      action();
      this.draw();
    }}, text);
    this.hugeButton = button(`Make one score in #${this.blocks[1].id} huge`, () =>
      Object.assign(this, {extra: 1000 - this.extra, numDone: 0}));
    this.rows = h("tbody");
    this.verdict = h("p", {"aria-live": "polite"});
    this.pool = h("ol", {"aria-label": "The pool"});
    root.append(this.pool, h("div.np-settings",
      button("Next block", () => this.numDone = Math.min(this.numDone + 1, this.blocks.length)),
      button("Start over", () => this.numDone = 0),
      button("Shuffle the order", () => this.shuffle()), this.hugeButton),
      h("table", h("thead", h("tr", ["block", "its scores", "highest so far", "sums so far", "denominator",
        "numerator"].map(title => h("th", {scope: "col"}, title)))), this.rows), this.verdict);
    this.draw();
  }

  // Another order; it need not be drawn with equal chances.
  shuffle() {
    const before = this.order.join();
    do this.order.sort(() => Math.random() - 0.5); while (this.order.join() === before);
    this.numDone = 0;
  }

  scores(block) {
    return this.blocks[block].scores.map((score, key) =>
      block === 1 && key === 0 ? score + this.extra : score);
  }

  // The sums after each block.
  sums() {
    let highest = -Infinity, total = 0, acc = 0;
    return this.order.map(block => {
      const scores = this.scores(block);
      const higher = Math.max(highest, ...scores);
      const shrink = Math.exp(highest - higher);
      const weights = scores.map(score => Math.exp(score - higher));
      const own = weights.reduce((sum, weight) => sum + weight, 0);
      total = total * shrink + own;
      acc = acc * shrink + weights.reduce(
        (sum, weight, key) => sum + weight * this.blocks[block].values[key], 0);
      highest = higher;
      return {block, own, shrink, highest, total, acc};
    });
  }

  draw() {
    const sums = this.sums();
    const most = name => Math.max(...sums.map(sum => Math.abs(sum[name])), 1e-9);
    const bar = (name, sum, isDone) => h("td", isDone ? [sum[name].toFixed(4),
      h("i", {style: `width: ${100 * Math.abs(sum[name]) / most(name)}%`})] : []);
    const now = this.blocks[this.order[this.numDone - 1]]?.id;
    this.pool.replaceChildren(...Array.from({length: this.pool_size}, (_, id) => h("li", {
      class: id === now ? "np-current" : this.blocks.some(block => block.id === id) ? "" : "np-other"},
      `#${id}`)));
    this.hugeButton.setAttribute("aria-pressed", String(this.extra > 0));
    this.rows.replaceChildren(...sums.map((sum, index) => {
      const scores = this.scores(sum.block);
      const isDone = index < this.numDone;
      return h("tr", {class: index === this.numDone - 1 ? "np-current" : ""},
        h("th", {scope: "row"}, `#${this.blocks[sum.block].id}`),
        h("td", `${Math.min(...scores).toFixed(1)} to ${Math.max(...scores).toFixed(1)}`),
        bar("highest", sum, isDone),
        h("td", !isDone || index === 0 ? "" : sum.shrink === 1 ? "stay" : `\u00d7 ${sum.shrink.toFixed(4)}`),
        bar("total", sum, isDone), bar("acc", sum, isDone));
    }));
    const {highest, total, acc} = sums.at(-1);
    const plain = Math.exp(highest) === Infinity ? "Without the highest score subtracted, the "
      + "sum would be infinite. " : "";
    const [before, at] = [sums[this.numDone - 2] ?? {total: 0}, sums[this.numDone - 1]];
    const step = at ? `Denominator: ${before.total.toFixed(4)} \u00d7 ${at.shrink.toFixed(4)} + `
      + `${at.own.toFixed(4)} = ${at.total.toFixed(4)}. ` : "";
    this.verdict.textContent = this.numDone < sums.length
      ? `${step}${this.numDone} of ${plural(sums.length, "block")} done.`
      : `${step}${plain}Result: ${acc.toFixed(4)} / ${total.toFixed(4)} = ${(acc / total).toFixed(3)}. `
        + (this.extra ? "That is the value of the key with the huge score."
          : `The engine\u2019s kernel gave ${this.result.toFixed(3)}, in the order of the block table.`);
  }
}

// Say at the end of the page how many of its questions have been answered.
async function countAnswers() {
  let all = 0, answered = 0, right = 0;
  for (const {runs: [{trace}], answers} of await npPlayers) {
    all += trace.questions.length;
    answered += answers.size;
    right += trace.questions.filter(asked => answers.get(asked.frame) === asked.right).length;
  }
  for (const place of document.querySelectorAll(".np-answers")) {
    place.textContent = `${answered} of ${plural(all, "question")} answered, ${right} right`;
  }
}

// The bar above a long page: which chapter one is in, and how far one has come.
function followChapters(bar) {
  const links = [...bar.querySelectorAll("li a")];
  const draw = () => {
    const at = links.findLastIndex(({hash}) =>
      document.querySelector(hash).getBoundingClientRect().top < innerHeight / 2);
    links.forEach((link, index) => link.setAttribute("aria-current", String(index === at)));
    bar.querySelector("b").textContent = links[at]?.textContent ?? "Contents";
    bar.style.setProperty("--read", scrollY / (document.body.scrollHeight - innerHeight));
  };
  bar.addEventListener("click", ({target}) => {
    if (target.matches("a")) bar.querySelector("details").open = false;
  });
  addEventListener("scroll", draw, {passive: true});
  draw();
}

addEventListener("DOMContentLoaded", () => {
  const isAlone = document.body.classList.contains("np-page");
  const all = Promise.all([...document.querySelectorAll(".np-player")].map(
    async root => new Player(root, await Promise.all([...root.querySelectorAll("script")].map(
      async ({dataset, textContent}) => {
        const states = await unpack(textContent);
        return {setting: dataset.setting, trace: JSON.parse(states.pop()), states};
      })), isAlone)));
  // Resolves to the players when all of them can be used.
  globalThis.npPlayers = all.then(players => {
    players.find(player => player.frameOfLink() !== null)?.reveal("instant");
    return players;
  });
  countAnswers();
  document.querySelectorAll(".progress").forEach(followChapters);
  for (const root of document.querySelectorAll(".np-softmax")) new Softmax(root);
});

})();
