// Plays a trace of the engine: see page.py. Each <section class="np-player"> holds one.
//
// The page knows no rule of the engine. It folds the recorded deltas into a state, and
// draws that. What happened, and which line of the source did it, comes with the trace.
// All text is put in as text nodes, so nothing in a prompt can become markup.

"use strict";

(() => {

const PAPER = "https://arxiv.org/abs/2309.06180";
const MOST_GROUPS = 8;       // requests that are drawn, until somebody asks for more
const MOST_LARGE_CELLS = 64; // of a pool: beyond that, cells are small and have no text
const MOST_TOKENS = 120;      // tokens of one sequence that are drawn
const NUM_HUES = 6;
const FRAME_MS = 900;
const SPEEDS = [1, 2, 4, 0.5, 1];
const NOBODY = [];
const PHASES = {
  start: ["before the run", "What the engine held when the recording began."],
  begin: ["between steps", "Requests come and go before the next step is scheduled."],
  scheduled: ["scheduled", "Tokens and blocks are assigned; the forward pass comes next."],
  updated: ["updated", "The forward pass is done; the sampled tokens are appended."],
  end: ["after the run", "What the engine held when the recording ended."],
};
// Kinds of events that get a tick on the timeline; each kind has a line of its own.
const TICKS = [
  ["prefix", ["prefix"]], ["fork", ["fork"]], ["copy", ["copy"]], ["beam", ["beam"]],
  ["preempt", ["recompute", "swap_out"]], ["swap in", ["swap_in"]], ["end", ["finish", "abort"]],
];


// -- The state at every frame ----------------------------------------------------------

// Steps through the frames in both directions. Every change can be undone.
class Tape {
  constructor(frames) {
    this.frames = frames;
    this.state = {};
    this.undo = [];          // for every folded frame, how to undo it
  }

  get position() { return this.undo.length - 1; }

  seek(target) {
    while (this.position < target) {
      const undo = [];
      fold(this.state, this.frames[this.position + 1].delta, undo);
      this.undo.push(undo);
    }
    while (this.position > target) {
      for (const change of this.undo.pop().reverse()) change();
    }
  }
}

// The same rules as `fold` in state.py: null deletes, an object goes one level down, an
// array has splices and appended items, and anything else is a new value.
function fold(target, delta, undo) {
  for (const [key, change] of Object.entries(delta)) {
    const old = target[key];
    if (change !== null && typeof change === "object") {
      if (old === undefined) {
        target[key] = Array.isArray(change) ? [] : {};
        undo.push(() => { delete target[key]; });
      }
      if (Array.isArray(change)) splice(target[key], change, undo);
      else fold(target[key], change, undo);
    } else {
      if (change === null) delete target[key];
      else target[key] = change;
      undo.push(() => { if (old === undefined) delete target[key]; else target[key] = old; });
    }
  }
}

function splice(list, parts, undo) {
  for (const part of parts) {
    const [start, count, packed] = Array.isArray(part) ? part : [list.length, 0, [part]];
    const inserted = unpack(packed);
    const removed = list.splice(start, count, ...inserted);
    undo.push(() => { list.splice(start, inserted.length, ...removed); });
  }
}

// [4, 7] stands for 4, 5, 6, 7.
function unpack(items) {
  return items.flatMap(item => Array.isArray(item)
    ? Array.from({length: item[1] - item[0] + 1}, (_, index) => item[0] + index) : [item]);
}


// -- What a state means for the page ---------------------------------------------------

// Everything that is looked up while one frame is drawn.
class View {
  constructor(state) {
    this.state = state;
    this.size = state.block_size;
    this.cache = new Map();    // sequence -> its tokens
    this.owners = new Map();   // block -> [{key, index}], from the block tables
    for (const [key, seq] of Object.entries(state.seqs)) {
      seq.table.forEach((block, index) => {
        if (!this.owners.has(block)) this.owners.set(block, []);
        this.owners.get(block).push({key, index});
      });
    }
  }

  ownersOf(block) { return this.owners.get(block) ?? NOBODY; }

  sequencesOf(group) {
    const keys = [];
    while (`${group}.${keys.length}` in this.state.seqs) keys.push(`${group}.${keys.length}`);
    return keys;
  }

  // All tokens of a sequence, the prompt's first.
  tokens(key) {
    if (!this.cache.has(key)) {
      const {prompt_tokens: prompt} = this.state.groups[groupOf(key)];
      this.cache.set(key, prompt.concat(this.state.seqs[key].tokens));
    }
    return this.cache.get(key);
  }

  // How many slots of logical block `index` hold a token, and how many of those are new.
  slots(key, index) {
    const {computed, now} = this.state.seqs[key];
    const inBlock = count => Math.max(0, Math.min(this.size, count - index * this.size));
    const filled = inBlock(computed);
    return {filled, fresh: filled - inBlock(computed - now)};
  }

  // The same for a physical block: the most slots that any of its owners has filled.
  filled(block) {
    const owners = this.ownersOf(block);
    return Math.max(0, ...owners.map(({key, index}) => this.slots(key, index).filled));
  }

  // The token ids in a block; null stands for one that only the device knows yet.
  content(block) {
    const owner = this.owners.get(block)?.[0];
    if (!owner) return this.state.blocks[block]?.tokens ?? [];
    const {filled} = this.slots(owner.key, owner.index);
    const first = owner.index * this.size;
    const tokens = this.tokens(owner.key).slice(first, first + filled);
    return [...tokens, ...Array(filled - tokens.length).fill(null)];
  }

  refs(block) { return this.state.blocks[block]?.refs ?? 0; }

  isCached(block) { return this.state.blocks[block]?.cached ?? false; }

  isOnDevice(block) { return block < this.state.num_blocks; }
}

const groupOf = key => key.split(".")[0];
const hue = group => `np-hue${Number(group) % NUM_HUES}`;
const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function ordinal(number) {
  const tens = number % 100;
  const ending = tens > 10 && tens < 14 ? "th" : {1: "st", 2: "nd", 3: "rd"}[number % 10] ?? "th";
  return number + ending;
}

// Characters that cannot be seen, or that turn the direction of what follows, by code.
const HIDDEN = new RegExp("[\\u0000-\\u0009\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200b\\u200e"
  + "\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff\\ud800-\\udfff]", "gu");

function visible(text) {
  const code = character => character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  const shown = text.replace(HIDDEN, character => `\u2039U+${code(character)}\u203a`);
  return shown.replaceAll("\n", "\u21b5");
}


// -- Making elements -------------------------------------------------------------------

// h("p.note", {title: "x"}, "text", ..) is <p class="note" title="x">text..</p>. Null is
// left out.
function h(selector, ...rest) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  if (tag === "button") element.type = "button";
  if (classes.length > 0) element.className = classes.join(" ");
  const hasAttributes = rest[0] !== null && typeof rest[0] === "object"
    && !Array.isArray(rest[0]) && !(rest[0] instanceof Node);
  for (const [name, value] of Object.entries(hasAttributes ? rest.shift() : {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.classList.add(...value.split(" ").filter(Boolean));
    else element.setAttribute(name, value);
  }
  element.append(...rest.flat().filter(child => child !== null));
  return element;
}

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS(svg.namespaceURI, "path");
  shape.setAttribute("d", path);
  svg.append(shape);
  return svg;
}

const ICONS = {
  first: "M3 3h2v10H3zM13 3v10L6 8z",
  back: "M11 3v10L4 8z",
  play: "M4 2v12l9-6z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  next: "M5 3v10l7-5z",
};

// Make the children of `parent` those of `items`, {key, data, build, fill}. A child is
// built again only if its data, a string, has changed; `fill` then brings what is inside
// it up to date. Most of a frame is as it was.
function sync(parent, items) {
  const old = new Map();
  for (const child of parent.children) old.set(child.npKey, child);
  let place = parent.firstElementChild;
  for (const {key, data = "", build, fill} of items) {
    let child = old.get(key);
    if (!child || child.npData !== data) {
      const made = build();
      made.npKey = key;
      made.npData = data;
      if (child && child === place) place = made;
      child?.replaceWith(made);
      child = made;
    }
    old.delete(key);
    if (child === place) place = place?.nextElementSibling ?? null;
    else parent.insertBefore(child, place);
    fill?.(child);
  }
  for (const child of old.values()) child.remove();
}


// -- The player ------------------------------------------------------------------------

class Player {
  constructor(root, isAlone) {
    this.root = root;
    this.trace = JSON.parse(root.querySelector("script").textContent);
    this.tape = new Tape(this.trace.frames);
    this.isAlone = isAlone;
    this.limit = MOST_GROUPS;
    this.timer = this.lit = null;
    this.speed = 1;
    this.hasDrawn = false;
    this.cells = this.findCells();
    this.build();
    this.opening = isAlone ? 0 : this.findOpening();
    this.show(this.frameOfLink() ?? this.opening);
    addEventListener("hashchange", () => {
      const frame = this.frameOfLink();
      if (frame !== null) this.show(frame);
    });
  }

  // The step that the page asks for, or the first: before that there is nothing to see.
  findOpening() {
    const {opensAt} = this.root.dataset;
    const isRunning = frame => (frame.delta.running ?? []).length > 0;
    return this.frameOf(opensAt) ?? Math.max(0, this.trace.frames.findIndex(isRunning));
  }

  get last() { return this.trace.frames.length - 1; }
  get frame() { return this.trace.frames[this.tape.position]; }

  // The blocks that get a cell: all of a small pool; of a large one, those in use.
  findCells() {
    const touched = new Set();
    for (const frame of this.trace.frames) {
      for (const block of Object.keys(frame.delta.blocks ?? {})) touched.add(Number(block));
    }
    const {num_blocks: device, num_swap_blocks: swap} = this.trace.frames[0].delta;
    const used = (first, count) =>
      [...touched].filter(block => block >= first && block < first + count).sort((a, b) => a - b);
    const all = Array.from({length: device}, (_, block) => block);
    return {device: device <= MOST_LARGE_CELLS ? all : used(0, device), swap: used(device, swap)};
  }

  // -- What stays the same in all frames

  build() {
    const level = this.isAlone ? "1" : "3";
    this.where = h("p.np-where");
    this.live = h("p.np-hidden", {"aria-live": "polite"});
    this.main = h("div.np-main",
      this.panel("requests", "Requests"), this.panel("tables", "Block tables"),
      this.panel("pools", "Physical blocks"));
    this.detail = h("p.np-detail");
    this.requests.append(
      this.budget = h("div.np-bar", {"aria-hidden": "true"}), this.queue = h("div.np-list"),
      h("p.np-text.np-howto", h("span.np-done", "computed"), " ",
        h("span.np-now", "by this step"), " ", h("span.np-todo", "not yet")));
    this.tablesNote.append(h("i.np-now", "this step"), " ", h("i.np-empty", "empty"),
      " ", h("i.np-above", "drawn above"));
    this.tables.append(this.tableList = h("div.np-list"));
    this.pools.append(
      this.device = this.pool("Device pool", this.cells.device),
      this.deviceNote = h("p.np-note"),
      h("h4", "CPU pool"),
      this.swap = this.pool("CPU pool", this.cells.swap),
      this.swapNote = h("p.np-note"), this.detail);
    this.root.append(
      h("header.np-head",
        h("div.np-top",
          h("p.np-title", {role: "heading", "aria-level": level}, visible(this.trace.title)),
          this.where),
        this.leftOut(), this.controls(), this.timeline()),
      this.main, this.story(), this.live);
    // A click anywhere in the player gives it the focus, or something in it.
    this.root.tabIndex = -1;
    this.root.addEventListener("keydown", event => this.onKey(event));
    if (this.isAlone) {
      document.addEventListener("keydown", event => {
        if (!this.root.contains(event.target)) this.onKey(event);
      });
    }
    for (const name of ["pointerover", "focusin"]) {
      this.root.addEventListener(name, event => this.light(event.target.closest("[data-block]")));
    }
    this.root.addEventListener("pointerleave", () => this.light(null));
  }

  panel(name, title) {
    const id = `${this.root.id}-${name}`;
    const note = this[`${name}Note`] = h("p.np-note");
    this[name] = h("section", {class: `np-panel np-${name}`, "aria-labelledby": id},
      h("div.np-heading", h("h3", {id}, title), note));
    return this[name];
  }

  // The cells of a pool stay where they are: only what they show changes.
  pool(name, blocks) {
    const size = blocks.length <= MOST_LARGE_CELLS ? "np-large" : "np-small";
    return h("div.np-pool", {class: size, role: "group", "aria-label": name},
      blocks.map((block, index) => {
        const cell = h("button", {"data-block": block, tabindex: index === 0 ? 0 : -1});
        cell.npBlock = block;
        return cell;
      }));
  }

  leftOut() {
    const count = this.trace.left_out;
    return count === 0 ? null : h("p.np-note",
      `This run was long: ${plural(count, "frame")} are left out, first of all those in which `
      + "nothing rare happened. A frame shows all that has changed since the one before it.");
  }

  controls() {
    const button = (name, label, onclick) =>
      h("button.np-button", {"aria-label": label, title: label, onclick}, icon(ICONS[name]));
    this.playButton = button("play", "Play (space)", () => this.toggle());
    const speed = h("button.np-button", {"aria-label": "Speed", onclick: () => {
      this.speed = SPEEDS[SPEEDS.indexOf(this.speed) + 1];
      speed.textContent = `${this.speed}\u00d7`;
    }}, "1\u00d7");
    this.legend = h("div.np-legend", {role: "group", "aria-label": "Go to the next"},
      this.ticks().map(({name, frames}, line) => h("button",
        {class: `np-key np-tick${line}`, title: `Go to the next: ${name}`,
         onclick: () => this.goToNext(frames), ...(frames.length > 0 ? {} : {disabled: ""})},
        h("i"), `${name} ${frames.length}`)));
    return h("div.np-controls",
      button("first", "First frame (Home)", () => this.go(0)),
      button("back", "Back (left arrow)", () => this.go(this.tape.position - 1)),
      this.playButton,
      button("next", "Next (right arrow)", () => this.go(this.tape.position + 1)),
      speed, this.loop = h("p.np-loop", {"aria-hidden": "true"}), this.legend,
      h("p.np-keys", `${this.isAlone ? "Keys" : "Click, then"}: \u2190 \u2192 step, space plays, `
        + "Home and End go to the ends, \u2191 \u2193 from block to block"));
  }

  // The frames with a tick, for every line of the timeline.
  ticks() {
    return TICKS.map(([name, kinds]) => ({name, frames: this.trace.frames.flatMap(
      (frame, index) => frame.events.some(([kind]) => kinds.includes(kind)) ? [index] : [])}));
  }

  timeline() {
    this.slider = h("input", {
      type: "range", min: 0, max: this.last, value: 0, "aria-label": "Frame",
      oninput: () => this.go(Number(this.slider.value))});
    const ticks = this.ticks();
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", `np-ticks ${this.last < 250 ? "np-broad" : ""}`);
    svg.setAttribute("viewBox", `0 0 ${Math.max(1, this.last)} ${ticks.length * 4}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    ticks.forEach(({frames}, line) => {
      const path = document.createElementNS(svg.namespaceURI, "path");
      path.setAttribute("class", `np-tick${line}`);
      path.setAttribute("d", frames.map(index => `M${index} ${line * 4}v3`).join(""));
      svg.append(path);
    });
    return h("div.np-timeline", this.slider, svg);
  }

  story() {
    this.sentences = h("ol.np-sentences");
    this.source = h("aside.np-source", {"aria-label": "Source of what happened"});
    return h("section.np-story", {"aria-label": "What happened"}, this.sentences, this.source);
  }

  // -- Going from frame to frame

  go(frame) {
    this.pause();
    this.show(Math.max(0, Math.min(this.last, frame)));
    this.narrate();
    this.link();
  }

  goToNext(frames) {
    this.go(frames.find(frame => frame > this.tape.position) ?? frames[0]);
  }

  toggle() {
    if (this.timer !== null) {
      this.pause();
      this.link();
      return;
    }
    if (this.tape.position === this.last) this.show(0);
    this.setPlayButton("pause", "Pause (space)");
    this.tick();
  }

  tick() {
    this.timer = setTimeout(() => {
      this.show(this.tape.position + 1);
      this.narrate();
      if (this.tape.position < this.last) this.tick();
      else this.pause();
    }, FRAME_MS / this.speed);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.setPlayButton("play", "Play (space)");
  }

  setPlayButton(name, label) {
    this.playButton.replaceChildren(icon(ICONS[name]));
    this.playButton.title = label;
    this.playButton.setAttribute("aria-label", label);
  }

  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const block = event.target.closest("[data-block]");
    const blocks = [...block?.parentNode.querySelectorAll("[data-block]") ?? NOBODY];
    const focus = by => blocks[blocks.indexOf(block) + by]?.focus();   // in a pool, or a table
    const action = {
      ArrowLeft: () => this.go(this.tape.position - 1),
      ArrowRight: () => this.go(this.tape.position + 1),
      Home: () => this.go(0),
      End: () => this.go(this.last),
      " ": event.target.tagName === "BUTTON" ? null : () => this.toggle(),
      ArrowUp: block && (() => focus(-1)),
      ArrowDown: block && (() => focus(1)),
    }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // "#step=7" is the first frame of step 7, "#step=7-updated" the one after its update.
  frameOfLink() {
    const [id, place] = location.hash.slice(1).split("=");
    return id === this.root.id ? this.frameOf(place) : null;
  }

  // "7" or "7-updated" -> the number of the frame, or null.
  frameOf(place) {
    if (!place) return null;
    const [step, phase] = place.split("-");
    const found = this.trace.frames.findIndex(frame =>
      frame.step === Number(step) && (phase ? frame.phase === phase : frame.phase === "scheduled"));
    return found >= 0 ? found : null;
  }

  link() {
    const {step, phase} = this.frame;
    try {
      history.replaceState(null, "", `#${this.root.id}=${step}-${phase}`);
    } catch {
      // A frame in a notebook has no address of its own.
    }
  }

  narrate() {
    const [label] = PHASES[this.frame.phase];
    const sentences = this.frame.events.map(([, sentence]) => sentence.replace(/[#@]/g, match =>
      match === "#" ? "block " : "sequence "));
    this.live.textContent = [`Step ${this.frame.step}, ${label}.`, ...sentences].join(" ");
  }

  // -- Drawing a frame

  show(frame) {
    const hasFocus = this.root.contains(document.activeElement);
    this.tape.seek(frame);
    this.view = new View(this.tape.state);
    const [label, meaning] = PHASES[this.frame.phase];
    this.slider.value = frame;
    this.slider.setAttribute("aria-valuetext", `step ${this.frame.step}, ${label}`);
    this.where.replaceChildren(
      h("strong", `Step ${this.frame.step}`), ` of ${this.trace.frames[this.last].step} \u00b7 `,
      h("em", label), h("span", meaning));
    this.loop.replaceChildren(...["schedule", "execute", "update"].map(part =>
      h("code", {class: this.frame.phase === `${part}d` ? "np-current" : ""}, part)));
    this.drawBudget();
    this.drawRequests();
    this.drawTables();
    this.drawPools();
    this.drawStory();
    this.root.classList.toggle("np-moving", this.hasDrawn);   // the first frame is still
    this.hasDrawn = true;
    if (this.lit !== null) this.mark(this.lit);
    // What had the focus may have been drawn anew.
    if (hasFocus && !this.root.contains(document.activeElement)) this.root.focus({preventScroll: true});
  }

  drawBudget() {
    const {seqs, budget} = this.tape.state;
    const parts = Object.entries(seqs).filter(([, seq]) => seq.now > 0);
    const total = parts.reduce((sum, [, seq]) => sum + seq.now, 0);
    const share = seq => 100 * seq.now / budget;
    this.requestsNote.textContent =
      `${total} of ${plural(budget, "token")} of the step\u2019s budget`;
    sync(this.budget, parts.slice(0, 64).map(([key, seq]) => ({
      key, data: String(seq.now), build: () =>
        h("i", {class: hue(groupOf(key)), style: `flex: 0 0 ${share(seq)}%`},
          share(seq) > 7 ? key : "")})));
  }

  drawRequests() {
    const {running, waiting, finished} = this.tape.state;
    const items = [];
    const queues = [["Running", running], ["Waiting", waiting], ["Finished", finished]];
    for (const [name, groups] of queues) {
      if (groups.length === 0 && name === "Finished") continue;
      items.push({key: name, data: String(groups.length), build: () =>
        h("h4", name, h("span.np-count", groups.length.toLocaleString("en")))});
      for (const group of groups.slice(0, this.limit)) {
        items.push({key: group, data: name,
          build: () => h("article.np-request", {class: hue(group)}),
          fill: article => this.fillRequest(article, group, name === "Finished")});
      }
      items.push(...this.more(name, groups.length));
    }
    sync(this.queue, items);
  }

  // A button that draws more of a long queue.
  more(name, count) {
    const hidden = count - this.limit;
    return hidden <= 0 ? [] : [{key: `${name} more`, data: String(hidden), build: () =>
      h("button.np-more", {onclick: () => this.drawMore()},
        `Show more: ${plural(hidden, "request")} not drawn`)}];
  }

  drawMore() {
    this.limit += MOST_GROUPS;
    this.show(this.tape.position);
  }

  fillRequest(article, group, isOver) {
    const {seqs, groups} = this.tape.state;
    const {kind, prompt, prompt_tokens: {length: numPrompt}} = groups[group];
    const keys = this.view.sequencesOf(group);
    const isSwapped = keys.some(key => seqs[key].table.some(block => !this.view.isOnDevice(block)));
    const mostComputed = (best, key) => seqs[key].computed > seqs[best].computed ? key : best;
    const leader = keys.reduce(mostComputed, keys[0]);
    const promptText = this.text(leader, 0, numPrompt, isOver);
    const items = [
      {key: "name", data: String(isSwapped), build: () => h("p.np-name",
        h("strong", `Request ${group}`), ` ${kind}`,
        isSwapped ? h("span.np-badge", "swapped out") : null)},
      {key: "prompt", data: JSON.stringify(promptText), build: () =>
        h("p.np-text", {title: visible(prompt)}, this.textElements(promptText))}];
    for (const key of keys) {
      const {tokens, computed, end} = seqs[key];
      const last = Math.max(numPrompt + tokens.length, computed);
      if (last === numPrompt && !end) continue;
      const text = this.text(key, numPrompt, last, isOver || end);
      items.push({key, data: JSON.stringify([text, end]), build: () => h("p.np-text.np-own",
        h("b", {"data-seq": key}, key), " ", this.textElements(text),
        end ? h("span.np-badge", end) : null)});
    }
    sync(article, items);
  }

  // Tokens `first` to `last` of a sequence, in pieces [kind, text]: neighbours that look
  // the same are one piece. Of a long text only the part around the newest tokens is drawn.
  text(key, first, last, isOver) {
    const {computed, now} = this.tape.state.seqs[key];
    const tokens = this.view.tokens(key);
    const end = Math.min(last, Math.max(computed + 24, first + MOST_TOKENS));
    const start = Math.max(first, end - MOST_TOKENS);
    const pieces = [];
    if (start > first) pieces.push(["elided", `${start - first} tokens \u2026 `]);
    const texts = this.texts(tokens.slice(start, end + 3));   // a character may go on past the end
    for (let index = start; index < end; index += 1) {
      const kind = isOver || index < computed - now ? "done" : index < computed ? "now" : "todo";
      const text = index < tokens.length ? texts[index - start] : this.piece(null);
      if (pieces.at(-1)?.[0] === kind) pieces.at(-1)[1] += text;
      else pieces.push([kind, text]);
    }
    if (end < last) pieces.push(["elided", ` \u2026 ${last - end} tokens`]);
    return pieces;
  }

  textElements(pieces) {
    return pieces.map(([kind, text]) => h("bdi", {class: `np-${kind}`}, text));
  }

  piece(token) {
    return token === null ? "?" : visible(this.trace.pieces[token] ?? "");
  }

  // The texts of tokens that follow each other. Several may make up one character: the
  // first one has it, and the others are empty.
  texts(tokens) {
    const texts = tokens.map(token => this.piece(token));
    for (let index = 0; index < texts.length; index += 1) {
      if (!texts[index].includes("\ufffd")) continue;
      for (let length = 2; length <= 4; length += 1) {
        const text = this.trace.pieces[tokens.slice(index, index + length).join()];
        if (text === undefined) continue;
        texts.splice(index, length, visible(text), ...Array(length - 1).fill(""));
        break;
      }
    }
    return texts;
  }

  drawTables() {
    const {running, waiting, seqs} = this.tape.state;
    const groups = [...running, ...waiting].filter(group =>
      this.view.sequencesOf(group).some(key => seqs[key].table.length > 0));
    this.drawn = new Set();   // a block is drawn with its tokens once, and small after that
    const items = groups.slice(0, this.limit).map(group => ({key: group,
      build: () => h("article", {class: `np-tablegroup ${hue(group)}`}),
      fill: article => this.fillTables(article, group)}));
    if (groups.length === 0) {
      const build = () => h("p.np-note", "No sequence holds a block.");
      items.push({key: "none", build});
    }
    sync(this.tableList, [...items, ...this.more("tables", groups.length)]);
  }

  fillTables(article, group) {
    const {seqs} = this.tape.state;
    const keys = this.view.sequencesOf(group).filter(key => seqs[key].table.length > 0);
    const waste = this.waste(group, keys);
    sync(article, [
      {key: "waste", data: JSON.stringify(waste), build: () => this.wasteStrip(group, waste)},
      ...keys.map(key => ({key, build: () =>
        h("div.np-table", {role: "group", "aria-label": `Block table of sequence ${key}`}),
        fill: row => this.fillTable(row, key)}))]);
  }

  // What it holds, and what contiguous memory for each sequence would have reserved.
  waste(group, keys) {
    const held = new Map();
    for (const key of keys) {
      this.tape.state.seqs[key].table.forEach((block, index) =>
        held.set(block, this.view.slots(key, index).filled));
    }
    const tokens = [...held.values()].reduce((sum, filled) => sum + filled, 0);
    const {reserved} = this.tape.state.groups[group];
    return {tokens, slots: held.size * this.view.size, reserved};
  }

  wasteStrip(group, {tokens, slots, reserved}) {
    const share = count => `flex: 0 0 ${100 * count / Math.max(reserved, slots)}%`;
    return h("div.np-waste",
      h("div.np-heading.np-name", h("strong", `Request ${group}`), h("p.np-note",
        `${plural(tokens, "token")} in ${plural(slots, "slot")}; `
        + `contiguous memory would reserve ${reserved}`)),
      h("div.np-strip", {"aria-hidden": "true"},
        h("i.np-held", {style: share(tokens)}), h("i.np-rest", {style: share(slots - tokens)})));
  }

  // One line: the logical blocks of a sequence.
  fillTable(row, key) {
    const {table} = this.tape.state.seqs[key];
    const tokens = this.view.tokens(key);
    const items = table.map((block, index) => {
      const isSmall = this.drawn.has(block);
      this.drawn.add(block);
      const {filled, fresh} = this.view.slots(key, index);
      const first = index * this.view.size;
      const held = isSmall ? [] : tokens.slice(first, first + filled);
      const data = [block, this.view.refs(block), filled, fresh, isSmall, held];
      return {key: index, data: JSON.stringify(data), build: () => this.entry(index, ...data)};
    });
    sync(row, [{key: "label", build: () => h("b", {"data-seq": key}, key)}, ...items]);
  }

  entry(index, block, refs, filled, fresh, isSmall, tokens) {
    const label = `logical block ${index}, physical block ${block}, `
      + `${filled} of ${this.view.size} slots filled, ${plural(refs, "reference")}`;
    return h("button", {class: `np-entry ${isSmall ? "np-small-entry" : ""}`, "data-block": block,
      tabindex: index === 0 ? 0 : -1, "aria-label": label},
      h("span.np-id", `#${block}`, refs > 1 ? h("small", `\u00d7${refs}`) : null),
      isSmall ? null : this.slotBar(tokens, filled, fresh));
  }

  // The slots of a block: with a token in each, if they are few.
  slotBar(tokens, filled, fresh) {
    const {size} = this.view;
    if (size > 4) {
      return h("span.np-slots", {"aria-hidden": "true"},
        h("bdi.np-slottext", this.texts(tokens).join("")),
        this.meter(filled, fresh));
    }
    const slots = Array.from({length: size}, (_, slot) => {
      if (slot >= filled) return h("i.np-empty");
      const text = this.piece(tokens[slot] ?? null).replace(/^ /, "\u00b7");
      return h(slot >= filled - fresh ? "i.np-now" : "i.np-done", text);
    });
    return h("span.np-slots.np-wide", {"aria-hidden": "true"}, slots);
  }

  meter(filled, fresh) {
    const {size} = this.view;
    const part = (kind, count) =>
      count > 0 ? h("i", {class: kind, style: `flex-grow: ${count}`}) : null;
    return h("span.np-meter", {style: `--size: ${size}`, "aria-hidden": "true"},
      part("np-done", filled - fresh), part("np-now", fresh), part("np-empty", size - filled));
  }

  drawPools() {
    const {state} = this.tape;
    const used = [...this.view.owners.keys()].filter(block => this.view.isOnDevice(block));
    const tokens = used.reduce((sum, block) => sum + this.view.filled(block), 0);
    const percent = Math.round(100 * tokens / (used.length * state.block_size));
    this.poolsNote.textContent = `${used.length} of ${plural(state.num_blocks, "block")} in use`
      + (used.length === 0 ? "" : `, ${percent}% filled`);
    for (const pool of [this.device, this.swap]) {
      const isLarge = pool.classList.contains("np-large");
      for (const cell of pool.children) this.fillCell(cell, cell.npBlock, isLarge);
    }
    this.note(this.deviceNote, state.num_blocks, this.cells.device.length);
    this.note(this.swapNote, state.num_swap_blocks, this.cells.swap.length);
  }

  note(place, total, drawn) {
    const count = total - drawn;
    const are = count === 1 ? "is" : "are";
    place.textContent = total === 0 ? "There is none."
      : count === 0 ? "" : `${plural(count, "block")} that this run never uses ${are} not drawn.`;
  }

  // The place in the order in which free blocks are taken, if something is lost by that.
  rankOf(block) {
    if (this.view.refs(block) > 0 || !this.view.isCached(block)) return 0;
    return this.tape.state.free.indexOf(block) + 1;
  }

  // A small cell shows whose a block is; a large one shows what is in it, too.
  fillCell(cell, block, isLarge) {
    const refs = this.view.refs(block);
    const owners = this.view.ownersOf(block);
    const first = groupOf(owners[0]?.key ?? "0");
    const isCached = refs === 0 && this.view.isCached(block);
    let name = isCached ? "np-cell np-cached" : "np-cell np-free";
    if (refs > 0) name = `np-cell np-used ${hue(first)}`;
    if (owners.some(({key}) => groupOf(key) !== first)) name += " np-mixed";
    if (cell.npName !== name || cell.npRefs !== refs) {
      cell.npName = cell.className = name;
      cell.npRefs = cell.dataset.refs = refs;
      const state = refs > 0 ? plural(refs, "reference") : isCached ? "free and cached" : "free";
      cell.setAttribute("aria-label", `block ${block}, ${state}`);
    }
    if (isLarge) {
      const names = owners.map(({key}) => key);
      const data = [refs, this.rankOf(block), names, this.view.filled(block), this.view.content(block)];
      const build = () => this.cellContent(block, ...data);
      sync(cell, [{key: "in", data: JSON.stringify(data), build}]);
    }
  }

  cellContent(block, refs, rank, names, filled, content) {
    const badge = refs > 0 ? `\u00d7${refs}` : rank ? ordinal(rank) : "";
    return h("span.np-in",
      h("span.np-id", `${block}`, badge ? h("small", badge) : null),
      h("bdi.np-celltext", this.texts(content).join("")),
      h("span.np-owners", names.length > 2 ? `${names[0]} +${names.length - 1}` : names.join(" ")),
      refs > 0 ? this.meter(filled, 0) : null);
  }

  // One block, in words.
  describe(block) {
    const refs = this.view.refs(block);
    const owners = this.view.ownersOf(block);
    const pool = this.view.isOnDevice(block) ? "" : "CPU ";
    const text = this.texts(this.view.content(block)).join("");
    const quoted = text ? ` It holds \u201c${text}\u201d.` : "";
    const found = this.view.isCached(block) ? " Others can find it." : "";
    if (refs > 0) {
      const names = owners.map(({key}) => key).join(", ");
      const slots = `${this.view.filled(block)} of ${this.view.size} slots filled`;
      return `${pool}Block ${block}: ${plural(refs, "reference")}, of ${names}; ${slots}.`
        + `${found}${quoted}`;
    }
    const rank = this.rankOf(block);
    if (!rank) return `${pool}Block ${block}: free.`;
    return `${pool}Block ${block}: free and still cached, ${ordinal(rank)} to be taken.${quoted}`;
  }

  drawStory() {
    const {events} = this.frame;
    this.sentences.replaceChildren(...events.map(([kind, sentence], index) =>
      h("li", {class: `np-event np-event-${kind}`},
        h("button.np-kind", {onclick: () => this.choose(index)}, this.trace.kinds[kind].label),
        h("span", this.sentence(sentence)))));
    if (events.length === 0) {
      this.sentences.append(h("li", h("span", "Nothing else happens here.")));
    }
    const notable = events.findIndex(([kind]) => !this.trace.kinds[kind].minor);
    this.choose(notable >= 0 ? notable : 0);
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
    const kind = this.frame.events[index]?.[0] ?? "compute";
    [...this.sentences.children].forEach((item, at) => {
      item.classList.toggle("np-chosen", at === index);
      item.querySelector("button")?.setAttribute("aria-pressed", String(at === index));
    });
    if (kind === this.shownKind) return;
    this.shownKind = kind;
    const {file, name, lines, at, paper} = this.trace.kinds[kind];
    const code = lines.map((line, number) => h(number === at ? "mark" : "span", {}, `${line}\n`));
    this.source.replaceChildren(
      h("p.np-file", h("code", name), h("span", file)),
      h("pre", {tabindex: "0"}, h("code", code)),
      h("p.np-paper", /^\d/.test(paper)
        ? [h("a", {href: PAPER, rel: "noreferrer"}, "The paper"), `, section ${paper}`] : [paper]));
  }

  // -- One block, wherever it is drawn

  light(element) {
    const block = element?.dataset.block ?? null;
    if (block !== this.lit) this.mark(this.lit = block);
  }

  mark(block) {
    const all = selector => this.root.querySelectorAll(selector);
    for (const element of all(".np-lit")) element.classList.remove("np-lit");
    this.detail.textContent = "";
    if (block === null) return;
    for (const element of all(`[data-block="${block}"]`)) element.classList.add("np-lit");
    this.detail.textContent = this.describe(Number(block));
  }

  // -- The page checks itself: "#check" in its address

  // Steps through all frames, forward and back, and returns what is wrong.
  check() {
    const failures = [];
    const states = [];
    const times = [];
    for (let frame = 0; frame <= this.last; frame += 1) {
      const started = performance.now();
      this.show(frame);
      this.root.getBoundingClientRect();   // the layout is a part of a change
      times.push(performance.now() - started);
      states.push(sortedText(this.tape.state));
      failures.push(...this.checkCounts(frame));
    }
    for (let frame = this.last; frame >= 0; frame -= 1) {
      this.tape.seek(frame);
      if (sortedText(this.tape.state) !== states[frame]) {
        failures.push(`frame ${frame}: folded back, it is not the same`);
      }
    }
    this.show(this.opening);
    times.sort((a, b) => a - b);
    return {
      frames: states.length, failures: failures.slice(0, 20),
      median_ms: times[times.length >> 1], slowest_ms: times.at(-1),
    };
  }

  // The references in the block tables are those that the cells show.
  checkCounts(frame) {
    const failures = [];
    const counted = new Map();
    for (const {table} of Object.values(this.tape.state.seqs)) {
      for (const block of table) counted.set(block, (counted.get(block) ?? 0) + 1);
    }
    for (const cell of this.root.querySelectorAll(".np-cell")) {
      const block = Number(cell.dataset.block);
      const expected = counted.get(block) ?? 0;
      const badge = cell.querySelector("small")?.textContent.match(/^\u00d7(\d+)$/);
      const shown = cell.firstChild ? Number(badge?.[1] ?? 0) : Number(cell.dataset.refs);
      if (shown !== expected) {
        failures.push(
          `frame ${frame}: block ${block} shows ${shown} references and has ${expected}`);
      }
      counted.delete(block);
    }
    for (const block of counted.keys()) failures.push(`frame ${frame}: block ${block} has no cell`);
    return failures;
  }
}

function sortedText(value) {
  return JSON.stringify(value, (_, item) => item && typeof item === "object" && !Array.isArray(item)
    ? Object.fromEntries(Object.entries(item).sort(([a], [b]) => a < b ? -1 : 1)) : item);
}

const errors = [];
addEventListener("error", event => errors.push(String(event.message)));
addEventListener("unhandledrejection", event => errors.push(String(event.reason)));

addEventListener("DOMContentLoaded", () => {
  const roots = [...document.querySelectorAll(".np-player")];
  const isAlone = document.body.classList.contains("np-page");
  const players = roots.map(root => new Player(root, isAlone));
  if (location.hash !== "#check") return;
  const checks = players.map(player => ({id: player.root.id, ...player.check()}));
  const requests = performance.getEntriesByType("resource").map(entry => entry.name);
  const result = {players: checks, errors, requests};
  document.body.append(h("pre", {id: "np-check"}, JSON.stringify(result)));
});

})();
