"use strict";
// Shows how a sample evolves, text or image; for the trace pages and the playground.

const MIDDLE_DOT = "\u00b7", BREAK = "\u21b5";

// Makes an element; text is never read as HTML.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Colours of probabilities, between three that the theme gives.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  return ["--unsure", "--middle", "--sure"].map(name => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    return [0, 2, 4].map(i => parseInt(hex.slice(i, i + 2), 16));
  });
}

function mixed(colours, p) {
  const place = Math.min(1, Math.max(0, p)) * (colours.length - 1);
  const low = Math.min(Math.floor(place), colours.length - 2);
  return colours[low].map((c, i) => Math.round(c + (place - low) * (colours[low + 1][i] - c)));
}

// Lets the pointer and the arrow keys choose one of `count()` places of a view.
function navigable(view, {count, rowOf, place, choose}) {
  let here = -1;
  const go = n => { here = n; choose(n, true); };
  view.addEventListener("keydown", event => {
    const last = count() - 1, before = here < 0 ? 0 : here;
    const to = {ArrowRight: before + (here >= 0), ArrowLeft: before - 1, Home: 0, End: last,
      ArrowDown: rowOf(before, 1), ArrowUp: rowOf(before, -1)}[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    go(Math.min(last, Math.max(0, to)));
  });
  view.addEventListener("pointermove", event => {
    const n = place(event);
    if (n !== undefined && n !== here) { here = n; choose(n, false); }
  });
  view.addEventListener("blur", () => { here = -1; choose(-1, true); });
}

// The place one row below or above, for elements that wrap.
function rowAmong(spans, n, by) {
  const box = spans[n]?.getBoundingClientRect();
  if (!box) return 0;
  for (let i = n + by, best; i >= 0 && i < spans.length; i += by) {
    const other = spans[i].getBoundingClientRect();
    if (Math.abs(other.top - box.top) < 2) continue;
    for (best = i; spans[i] && Math.abs(spans[i].getBoundingClientRect().top - other.top) < 2;
      i += by) {
      const at = spans[i].getBoundingClientRect(), old = spans[best].getBoundingClientRect();
      if (Math.abs(at.left - box.left) < Math.abs(old.left - box.left)) best = i;
    }
    return best;
  }
  return n;
}

function save(blob, name) {
  const link = make("a", {download: name, href: URL.createObjectURL(blob)});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

class Trace {
  // root: an empty element. name: of files that are saved. onShow(index): after each frame.
  constructor(root, {name = "trace", onShow = () => {}} = {}) {
    Object.assign(this, {root, name, onShow, frames: [], index: -1, timer: null});
    this.play = make("button", {type: "button", class: "play", text: "Play"});
    this.slider = make("input", {type: "range", class: "steps", min: 0, value: 0, max: 0,
      "aria-label": "Step"});
    this.label = make("p", {class: "label"});
    this.detail = make("p", {class: "detail", "aria-live": "polite"});
    this.layout = make("select", {"aria-label": "Layout of the text"},
      make("option", {value: "grid", text: "Fixed grid"}),
      make("option", {value: "lines", text: "Lines of text"}));
    this.png = make("button", {type: "button", text: "Save PNG"});
    this.svg = make("button", {type: "button", text: "Save SVG"});
    this.legend = make("div", {class: "legend soft"});
    root.classList.add("trace");
    this.play.addEventListener("click", () => this.timer ? this.pause() : this.run());
    this.slider.addEventListener("input", () => { this.pause(); this.show(+this.slider.value); });
    this.layout.addEventListener("change", () => this.arrange());
    this.png.addEventListener("click", () => this.savePicture());
    this.svg.addEventListener("click", () => this.saveDrawing());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.refresh());
  }

  // sample: {words, mask, prompt, length, unit, wide, shape, coded, factor, values, scale, flat,
  // frames}. Frames of codes also have a picture, the address of the decoded image.
  open(sample) {
    this.pause();
    Object.assign(this, {sample, frames: [], index: -1, now: [], image: null, fixed: new Set(sample.prompt)});
    this.words = Array.isArray(sample.words) ? {...sample.words} : sample.words;
    this.view = sample.shape ? this.pictures() : this.tokens();
    const tools = sample.shape ? [this.png, this.svg] : [this.layout, this.png, this.svg];
    this.root.replaceChildren(make("div", {class: "row"}, this.play, this.slider), this.label,
      this.view, this.detail, make("div", {class: "row"}, ...tools), this.legend);
    this.explain();
    for (const frame of sample.frames ?? []) this.frames.push(frame);
    this.slider.max = Math.max(0, this.frames.length - 1);
    if (this.frames.length) this.show(0);
  }

  // Appends a frame {step, changes: [[position, symbol, probability], ...]} and shows it.
  push(frame, words = {}) {
    Object.assign(this.words, words);
    const follows = this.index === this.frames.length - 1;
    this.frames.push(frame);
    this.slider.max = this.frames.length - 1;
    if (follows) this.show(this.frames.length - 1);
  }

  // The symbols at the end, whichever frame is shown.
  final() {
    const symbols = [];
    for (const {changes} of this.frames) for (const [n, symbol] of changes) symbols[n] = symbol;
    return symbols;
  }

  isOpen(state, n) {
    return !this.fixed.has(n) && (state.symbol === this.sample.mask || state.sure === 0);
  }

  apply(index) {
    for (const [n, symbol, sure] of this.frames[index].changes) {
      const old = this.now[n] ?? {symbol: -2, taken: 0}, next = {...old, symbol, sure};
      if (symbol !== old.symbol) next.frame = index;
      next.blank = this.isOpen(next, n);
      if (old.symbol >= 0 && !old.blank && next.blank) {
        Object.assign(next, {before: old.symbol, takenAt: index, taken: old.taken + 1});
      }
      this.now[n] = next;
    }
  }

  show(index) {
    const from = index === this.index + 1 ? index : 0;
    if (from === 0) this.now = Array.from({length: this.sample.length}, () =>
      ({symbol: -2, taken: 0, sure: 0, blank: false}));
    for (let i = from; i <= index; i++) this.apply(i);
    this.index = index;
    this.refresh();
    this.slider.value = index;
    this.label.textContent = this.slider.ariaValueText = this.said();
    this.onShow(index);
  }

  refresh() {
    if (this.index < 0) return;
    this.colours = readColours();
    if (this.sample.shape) this.paint(); else this.write();
  }

  said() {
    const {unit} = this.sample, at = this.frames[this.index].step;
    const free = this.now.filter((_, n) => !this.fixed.has(n));
    const back = this.now.filter(s => s.takenAt === this.index).length;
    const drawn = free.filter(s => s.symbol >= 0 && !s.blank).length;
    let said = `step ${at}: ${drawn} of ${free.length} ${unit} drawn`;
    if (this.sample.final && this.sample.mask < 0) {
      const same = this.now.filter((s, n) => !this.fixed.has(n) &&
        s.symbol === this.sample.final[n]).length;
      said = `step ${at}: ${same} of ${free.length} ${unit} as at the end`;
    }
    return back ? `${said}, ${back} taken back` : said;
  }

  word(symbol) { return this.words[symbol] ?? ""; }

  describe(n) {
    const state = this.now[n];
    if (!state || state.symbol < 0) return "";
    const {shape, coded} = this.sample;
    const shown = symbol => shape ? `${coded ? "code" : "level"} ${this.word(symbol)}`
      : JSON.stringify(this.word(symbol));
    const step = frame => this.frames[frame].step;
    let said = this.fixed.has(n) ? `${shown(state.symbol)}, given`
      : state.blank ? "not drawn yet"
        : `${shown(state.symbol)}, drawn at step ${step(state.frame)} with probability ` +
          `${state.sure}`;
    if (state.taken) {
      said += `; ${shown(state.before)} was taken back at step ${step(state.takenAt)}`;
      if (state.taken > 1) said += `, ${state.taken} times in all`;
    }
    return said;
  }

  // Text

  tokens() {
    const {length, wide} = this.sample;
    const view = make("div", {class: "tokens", tabindex: 0, role: "application",
      "aria-label": "Tokens: arrow keys move between them"});
    view.classList.toggle("wide", !!wide);
    view.style.setProperty("--width", wide ? "8ch" : "1ch");
    this.spans = Array.from({length}, () => make("span", {class: "token"}));
    view.append(...this.spans);
    const chosen = (n, byKey) => {
      for (const span of view.querySelectorAll(".here")) span.classList.remove("here");
      if (byKey) this.spans[n]?.classList.add("here");
      this.detail.textContent = n < 0 ? this.hint() : `Position ${n}: ${this.describe(n)}`;
    };
    navigable(view, {count: () => length, choose: chosen,
      rowOf: (n, by) => rowAmong(this.spans, n, by),
      place: event => {
        const n = this.spans.indexOf(event.target);
        return n < 0 ? undefined : n;
      }});
    this.detail.textContent = this.hint();
    queueMicrotask(() => this.arrange());
    return view;
  }

  place() { return this.sample.coded ? "code" : this.sample.shape ? "pixel" : "token"; }

  hint() {
    return `Point at a ${this.place()}, or use the arrow keys, to see when it was drawn and how sure the ` +
      "model was.";
  }

  arrange() {
    for (const name of ["grid", "lines"]) this.view.classList.toggle(name, this.layout.value === name);
    this.refresh();
  }

  write() {
    const lines = this.layout.value === "lines";
    this.now.forEach((state, n) => {
      const back = state.takenAt === this.index;
      const fresh = state.frame === this.index && this.index > 0 && !state.blank;
      const kind = this.fixed.has(n) ? "prompt" : back ? "back" : state.blank ? "blank"
        : fresh ? "new" : state.symbol < 0 ? "blank" : "";
      const word = back ? this.word(state.before)
        : state.symbol < 0 ? "" : state.symbol === this.sample.mask ? MIDDLE_DOT
          : this.word(state.symbol);
      const span = this.spans[n];
      span.textContent = lines && word.endsWith(BREAK) ? `${word}\n` : word;
      span.className = `token ${kind}${state.taken && !back ? " again" : ""}`.trim();
      span.style.color = kind === "" || kind === "new"
        ? `rgb(${mixed(this.colours, state.sure)})` : "";
    });
  }

  explain() {
    const sign = (kind, text) => make("span", {class: `token ${kind}`, text});
    const entry = (mark, text) => make("span", {}, mark, ` ${text}`);
    const scale = make("span", {}, "probability when drawn: 0", make("span", {class: "scale"}), "1");
    const parts = this.sample.shape ? [scale] : [scale, entry(sign("new", "abc"), "new at this step"),
      entry(sign("prompt", "abc"), "given"),
      entry(sign("back", "abc"), "taken back at this step"),
      entry(sign("again", "abc"), "taken back before")];
    if (this.sample.shape && this.sample.mask >= 0) {
      parts.push(make("span", {}, make("span", {class: "flat hatched"}), "not drawn yet"));
    } else if (this.sample.mask >= 0) parts.push(entry(sign("blank", MIDDLE_DOT), "not drawn yet"));
    this.legend.replaceChildren(...parts);
  }

  // Images

  pictures() {
    const {shape: [height, width, channels], factor} = this.sample;
    const names = ["The image", `Probability of each ${this.place()} when it was drawn`];
    this.canvases = names.map((name, which) => {
      const side = which ? 1 : factor;
      const canvas = make("canvas", {width: width * side, height: height * side, role: "img",
        "aria-label": name, class: "hatched"});
      canvas.style.width = `${width * this.sample.scale}px`;
      return canvas;
    });
    const view = make("div", {class: "pictures", tabindex: 0, role: "application",
      "aria-label": `Each ${this.place()}: arrow keys move between them`}, ...this.canvases.map((canvas, i) =>
      make("figure", {}, canvas, make("figcaption", {class: "soft",
        text: ["the image", "how sure the model was"][i]}))));
    const colours = ["red", "green", "blue"];
    navigable(view, {count: () => width * height, rowOf: (n, by) => n + by * width,
      place: event => {
        if (event.target.tagName !== "CANVAS") return undefined;
        const box = event.target.getBoundingClientRect();
        const part = (from, size, most) => Math.min(most - 1, Math.max(0, Math.floor(from / size * most)));
        return part(event.clientY - box.top, box.height, height) * width +
          part(event.clientX - box.left, box.width, width);
      },
      choose: n => {
        this.mark = n;
        this.refresh();
        if (n < 0) { this.detail.textContent = this.hint(); return; }
        const said = [...Array(channels).keys()].map(c =>
          `${channels === 3 ? `${colours[c]} ` : ""}${this.describe(n * channels + c)}`);
        this.detail.textContent =
          `Row ${Math.floor(n / width)}, column ${n % width}: ${said.join("; ")}`;
      }});
    this.detail.textContent = this.hint();
    this.mark = -1;
    return view;
  }

  // The decoded image of codes: the newest one, or the one before it while it is being read.
  decoded() {
    const frame = this.frames.findLast((each, i) => i <= this.index && each.picture);
    if (!frame) return null;
    if (!frame.image) {
      frame.image = new Image();
      frame.image.addEventListener("load", () => this.refresh());
      frame.image.src = frame.picture;
    }
    if (frame.image.complete && frame.image.naturalWidth) this.image = frame.image;
    return this.image;
  }

  // Colours of each place in both pictures, null where it is not drawn yet. Codes have none in the
  // first: `decoded` has.
  pixels() {
    const {values, coded} = this.sample, channels = this.sample.shape[2];
    return Array.from({length: this.now.length / channels}, (_, i) => {
      const states = this.now.slice(i * channels, (i + 1) * channels);
      if (states.some(s => s.symbol < 0 || s.symbol === this.sample.mask)) {
        return [null, null];
      }
      const [r, g = r, b = r] = coded ? [] : states.map(s => values[s.symbol]);
      return [coded ? [] : [r, g, b], mixed(this.colours, states.reduce((sum, s) => sum + s.sure, 0) / channels)];
    });
  }

  paint() {
    const found = this.pixels(), {shape: [, width], factor, coded} = this.sample;
    const image = coded ? this.decoded() : null;
    this.canvases.forEach((canvas, which) => {
      const context = canvas.getContext("2d"), side = which ? 1 : factor;
      const cell = n => [n % width * side, Math.floor(n / width) * side, side, side];
      if (coded && !which) {
        context.clearRect(0, 0, canvas.width, canvas.height);
        if (image) context.drawImage(image, 0, 0);
        found.forEach((both, n) => { if (!both[0]) context.clearRect(...cell(n)); });
      } else {
        const painted = context.createImageData(canvas.width, canvas.height);
        found.forEach((both, i) => painted.data.set(both[which] ? [...both[which], 255] : [0], 4 * i));
        context.putImageData(painted, 0, 0);
      }
      if (this.mark < 0) return;
      context.fillStyle = context.strokeStyle = "rgb(255, 0, 160)";
      const line = Math.ceil(side / 8), [x, y] = cell(this.mark);
      context.lineWidth = line;
      if (side < 8) context.fillRect(x, y, side, side);
      else context.strokeRect(x + line / 2, y + line / 2, side - line, side - line);
    });
  }

  // Playing and saving

  run() {
    if (this.index === this.frames.length - 1) this.show(0);
    this.play.textContent = "Pause";
    const pause = Math.min(400, Math.max(30, 8000 / this.frames.length));
    this.timer = setInterval(() => {
      if (this.index >= this.frames.length - 1) this.pause(); else this.show(this.index + 1);
    }, pause);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
  }

  // What is seen, as boxes with text: {width, height, items}.
  scene() {
    this.refresh();
    const style = getComputedStyle(document.documentElement), items = [];
    const colour = name => style.getPropertyValue(name).trim();
    const inner = this.view.getBoundingClientRect(), left = 12, top = 36;
    if (this.sample.shape) {
      const {shape: [rows, width], scale, flat, coded} = this.sample;
      if (coded && this.image) {
        items.push({x: left, y: top, w: width * scale, h: rows * scale, image: this.image});
      }
      this.pixels().forEach((both, i) => both.forEach((rgb, which) => {
        if (rgb && !rgb.length) return;  // a part of the image
        items.push({x: left + (i % width) * scale + which * (width * scale + 16),
          y: top + Math.floor(i / width) * scale, w: scale, h: scale, fill: `rgb(${rgb ?? flat})`});
      }));
    } else {
      for (const span of this.spans) {
        const own = getComputedStyle(span), text = span.textContent.replace("\n", "");
        const box = span.getClientRects()[0];
        if (!box) continue;
        items.push({x: box.left - inner.left + left, y: box.top - inner.top + top,
          w: box.width, h: box.height, text, colour: own.color,
          fill: own.backgroundColor === "rgba(0, 0, 0, 0)" ? "" : own.backgroundColor,
          struck: own.textDecorationLine === "line-through",
          given: span.classList.contains("prompt")});
      }
    }
    const edge = (a, b) => Math.max(...items.map(i => i[a] + i[b]));
    const height = Math.ceil(edge("y", "h")) + 36, width = Math.max(320, Math.ceil(edge("x", "w")) + 12);
    for (const [text, y] of [[this.title ?? this.name, 8], [this.said(), height - 28]]) {
      items.push({x: left, y, w: width, h: 20, text, colour: colour("--soft"), small: true});
    }
    return {width, height, items, paper: colour("--paper"), size: this.sample.shape ? 13
      : parseFloat(getComputedStyle(this.view).fontSize)};
  }

  savePicture() {
    const {width, height, items, paper, size} = this.scene(), scale = 2;
    const canvas = make("canvas", {width: width * scale, height: height * scale});
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = paper;
    context.fillRect(0, 0, width, height);
    context.textBaseline = "middle";
    for (const i of items) {
      if (i.image) context.drawImage(i.image, i.x, i.y, i.w, i.h);
      if (i.fill) { context.fillStyle = i.fill; context.fillRect(i.x, i.y, i.w, i.h); }
      if (!i.text) continue;
      context.fillStyle = i.colour;
      context.font = i.small ? "13px system-ui, sans-serif" : `${size}px ui-monospace, monospace`;
      context.fillText(i.text, i.x, i.y + i.h / 2, i.w + 1);
      if (i.struck) context.fillRect(i.x, i.y + i.h / 2, i.w, 1);
      if (i.given) context.fillRect(i.x, i.y + i.h - 2, i.w, 1.5);
    }
    canvas.toBlob(blob => save(blob, `${this.name}.png`));
  }

  saveDrawing() {
    const {width, height, items, paper, size} = this.scene();
    const space = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg")
      .namespaceURI;
    const node = (tag, attributes) => {
      const made = document.createElementNS(space, tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      return made;
    };
    const root = node("svg", {width, height, viewBox: `0 0 ${width} ${height}`});
    root.append(node("rect", {width, height, fill: paper}));
    for (const i of items) {
      if (i.image) root.append(node("image", {x: i.x, y: i.y, width: i.w, height: i.h, href: i.image.src}));
      if (i.fill) root.append(node("rect", {x: i.x, y: i.y, width: i.w, height: i.h, fill: i.fill}));
      if (!i.text) continue;
      const text = node("text", {x: i.x, y: i.y + i.h / 2, fill: i.colour, "xml:space": "preserve",
        "dominant-baseline": "central", "font-size": i.small ? 13 : size,
        "font-family": i.small ? "system-ui, sans-serif" : "ui-monospace, monospace"});
      if (i.struck) text.setAttribute("text-decoration", "line-through");
      if (i.given) text.setAttribute("text-decoration", "underline");
      text.textContent = i.text;
      root.append(text);
    }
    const source = new XMLSerializer().serializeToString(root);
    save(new Blob([source], {type: "image/svg+xml"}), `${this.name}.svg`);
  }
}
