"use strict";
// The playground. Requests go to the server of this page alone; text is never read as HTML.

const at = id => document.getElementById(id);
const ask = async (path, body, signal) => {
  const answer = await fetch(path, body === undefined ? {signal} : {method: "POST", signal,
    headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)});
  if (answer.ok) return answer;
  const {error} = await answer.json().catch(() => ({}));
  throw new Error(error ?? `the server answered ${answer.status}`);
};
const NAMES = {order: "Order", score: "Score", strategy: "Strategy", eta: "Strength"};
const spoken = name => name.replaceAll("_", " ");

let model, isImage, stopping = null, encoding = null, isRestored = false;
let written = "", tokens = [], hidden = new Set();  // a text, and what belongs to it
const panes = [];
let waiting = 0;

// A number with its noun, in the plural unless it is 1.
function amount(number, noun) { return `${number} ${noun}${Number(number) === 1 ? "" : "s"}`; }

// Shows a sentence; `more` is for those who hear the page.
function say(text, isError = false, more = "") {
  at("status").replaceChildren(text, make("span", {class: "heard", text: more}));
  at("status").classList.toggle("error", isError);
}

// Text: its tokens, as buttons that hide them

const debounced = (wait, act) => {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(act, wait); };
};

// Asks for the tokens of the text; resolves once those of the newest text are here, or to an error.
function encode() {
  const text = at("text").value;
  const own = encoding = ask("/api/tokens", {text}).then(answer => answer.json()).then(found => {
    if (own !== encoding) return encoding;
    [written, tokens] = [text, found.tokens];
    if (at("status").classList.contains("error")) say("");
    hidden = new Set([...hidden].filter(n => n < tokens.length && tokens[n] !== null));
    drawStrip();
  }).catch(error => {
    if (own !== encoding) return encoding;
    say(error.message, true);
    return error;
  });
  return own;
}

// Lists of token numbers, each a word, or each a token alone.
function groups() {
  const found = [];
  tokens.forEach((word, n) => {
    const last = found.at(-1), before = last && tokens[last.at(-1)];
    const begins = !last || word === null || before === null || at("singly").checked ||
      word.startsWith(" ") || before.endsWith(" ") || word === BREAK || before.endsWith(BREAK);
    if (begins) found.push([n]); else last.push(n);
  });
  return found;
}

function drawStrip() {
  const nodes = [];
  for (const group of groups()) {
    const isBlank = tokens[group[0]] === null, text = group.map(n => tokens[n]).join("");
    if (isBlank || at("singly").checked || text.replaceAll(BREAK, "").trim()) {
      const button = make("button", {type: "button",
        text: isBlank ? model.blank : text.trim() || "\u2423"});
      button.dataset.group = group.join(",");
      button.disabled = isBlank;
      if (isBlank) button.ariaLabel = "hidden";
      else press(button, group.every(n => hidden.has(n)));
      nodes.push(button);
    }
    if (!isBlank && text.endsWith(BREAK)) nodes.push(make("span", {class: "break"}));
  }
  at("strip").replaceChildren(...nodes);
  count();
}

function press(button, on) { button.ariaPressed = on; }

function count() {
  const blanks = tokens.filter(word => word === null).length;
  const said = `${tokens.length} of ${at("length").value} ${model.unit}`;
  at("count").textContent = tokens.length ? `${said}, ${hidden.size + blanks} hidden` : "";
  keep();
}

function hide(numbers) {
  hidden = new Set(numbers.filter(n => tokens[n] !== null));
  for (const button of at("strip").querySelectorAll("button:enabled")) {
    press(button, button.dataset.group.split(",").every(n => hidden.has(+n)));
  }
  count();
}

function listenToText() {
  at("text").addEventListener("input", debounced(250, encode));
  at("strip").addEventListener("click", event => {
    const button = event.target.closest("button");
    if (!button) return;
    const group = button.dataset.group.split(",").map(Number);
    const on = button.ariaPressed !== "true";
    for (const n of group) if (on) hidden.add(n); else hidden.delete(n);
    press(button, on);
    count();
  });
  at("hide-all").addEventListener("click", () => hide([...tokens.keys()]));
  at("show-all").addEventListener("click", () => hide([]));
  at("hide-half").addEventListener("click", () =>
    hide(groups().filter(() => Math.random() < 0.5).flat()));
  at("singly").addEventListener("change", drawStrip);
}

// Images: a picture, and the places (pixels, or codes with their pixels) that are hidden

// values: of the pixels, or the codes. image: what an autoencoder makes of the codes.
const picture = {values: null, image: null, cover: null, row: 0, column: 0, last: null};

function paintValues(context) {
  const [height, width, channels] = model.shape, painted = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    const [r, g = r, b = r] = picture.values.slice(i * channels, (i + 1) * channels);
    painted.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(painted, 0, 0);
}

function drawPicture() {
  const [height, width] = model.shape, canvas = at("picture"), context = canvas.getContext("2d");
  const cell = (row, column) =>
    [column * model.factor, row * model.factor, model.factor, model.factor];
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (picture.image) context.drawImage(picture.image, 0, 0);
  else if (picture.values) paintValues(context);
  picture.cover.forEach((open, i) => {
    if (open) context.clearRect(...cell(Math.floor(i / width), i % width));
  });
  context.fillStyle = "rgb(255, 150, 0)";
  if (document.activeElement === canvas) context.fillRect(...cell(picture.row, picture.column));
  const covered = picture.cover.reduce((sum, x) => sum + x, 0);
  at("covered").textContent = picture.values
    ? `${covered} of ${width * height} ${placeName()}s are hidden`
    : `From noise: all ${placeName()}s are drawn`;
  at("drop").disabled = !picture.values;
  keep();
}

function brush(row, column, on) {
  const [height, width] = model.shape, half = (at("brush").value - 1) / 2;
  for (let r = Math.max(0, row - half); r <= Math.min(height - 1, row + half); r++) {
    for (let c = Math.max(0, column - half); c <= Math.min(width - 1, column + half); c++) {
      picture.cover[r * width + c] = on;
    }
  }
  drawPicture();
}

const placeName = () => model.coded ? "code" : "pixel";

function setPicture(values, image = null) {
  Object.assign(picture, {values, image});
  picture.cover.fill(0);
  drawPicture();
}

// Shows codes with the image at an address.
async function setCodes(codes, address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  setPicture(codes, image);
}

async function openFile() {
  const [file] = at("file").files, [height, width, channels] = model.picture;
  if (!file) return;
  try {
    const image = await createImageBitmap(file);
    const small = make("canvas", {width, height}), context = small.getContext("2d");
    const side = Math.min(image.width / width, image.height / height);
    const [w, h] = [width * side, height * side];
    context.drawImage(image, (image.width - w) / 2, (image.height - h) / 2, w, h, 0, 0, width, height);
    const {data} = context.getImageData(0, 0, width, height), values = [];
    for (let i = 0; i < data.length; i += 4) {
      const [r, g, b] = data.slice(i, i + 3);
      values.push(...(channels === 3 ? [r, g, b] : [Math.round(0.299 * r + 0.587 * g + 0.114 * b)]));
    }
    const said = `${file.name}: ${image.width} x ${image.height} pixels, shown as ${width} x ${height}`;
    if (!model.coded) {
      setPicture(Uint8Array.from(values));
      say(said);
      return;
    }
    say("The autoencoder is at work…");
    const found = await (await ask("/api/codes", {picture: toBase64(values)})).json();
    await setCodes(found.codes, found.picture);
    say(`${said}, as the autoencoder makes them`);
  } catch (error) {
    say(error.name === "Error" ? error.message : `${file.name} cannot be read as a picture`, true);
  }
}

function listenToPicture() {
  const canvas = at("picture"), [height, width] = model.shape;
  [canvas.width, canvas.height] = [width * model.factor, height * model.factor];
  canvas.ariaLabel = `Picture: arrow keys move, Space hides or shows a ${placeName()}`;
  for (const option of at("brush").options) {
    option.text = `${option.value} ${placeName()}${option.value === "1" ? "" : "s"}`;
  }
  canvas.style.width = `${width * model.scale}px`;
  picture.cover = new Uint8Array(width * height);
  let drawing = null;
  const place = event => {
    const box = canvas.getBoundingClientRect();
    const part = (from, size, most) => Math.min(most - 1, Math.max(0, Math.floor(from / size * most)));
    return [part(event.clientY - box.top, box.height, height),
      part(event.clientX - box.left, box.width, width)];
  };
  canvas.addEventListener("pointerdown", event => {
    if (!picture.values) return;
    canvas.setPointerCapture(event.pointerId);
    const [row, column] = place(event);
    drawing = picture.cover[row * width + column] ? 0 : 1;
    brush(row, column, drawing);
  });
  canvas.addEventListener("pointermove", event => {
    if (drawing !== null) brush(...place(event), drawing);
  });
  canvas.addEventListener("pointerup", () => { drawing = null; });
  canvas.addEventListener("keydown", event => {
    const by = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (by) {
      picture.row = Math.min(height - 1, Math.max(0, picture.row + by[0]));
      picture.column = Math.min(width - 1, Math.max(0, picture.column + by[1]));
      drawPicture();
      const is = picture.cover[picture.row * width + picture.column] ? "hidden" : "shown";
      at("covered").textContent = `Row ${picture.row}, column ${picture.column}: ${is}`;
    } else if (event.key === " " && picture.values) {
      brush(picture.row, picture.column, picture.cover[picture.row * width + picture.column] ? 0 : 1);
    } else return;
    event.preventDefault();
  });
  canvas.addEventListener("focus", drawPicture);
  canvas.addEventListener("blur", drawPicture);
  at("file").addEventListener("change", openFile);
  at("take").addEventListener("click", () => model.coded
    ? setCodes(...picture.last) : setPicture(Uint8Array.from(picture.last)));
  at("drop").addEventListener("click", () => setPicture(null));
  at("uncover").addEventListener("click", () => { picture.cover.fill(0); drawPicture(); });
  at("cover-half").addEventListener("click", () => {
    picture.cover.forEach((_, i) => { picture.cover[i] = i % width >= width / 2 ? 1 : 0; });
    drawPicture();
  });
  drawPicture();
}

const toBase64 = values => btoa(Array.from(values, c => String.fromCharCode(c)).join(""));
const fromBase64 = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

// Settings, and the link that holds them

function choices(id, values, chosen, name = spoken) {
  at(id).replaceChildren(...values.map(value => make("option", {value, text: name(`${value}`)})));
  at(id).value = at(id).dataset.usual = chosen;
}

const usual = control => control.dataset.usual ?? control.defaultValue ?? "";

function samplerFields(n) {
  const box = make("div", {class: "sampler fields"});
  const field = (name, control) => {
    const label = make("label", {text: `${name} `});
    label.append(control);
    return label;
  };
  const sampler = make("select", {id: `sampler-${n}`}), steps = make("select", {id: `steps-${n}`});
  const own = make("div", {id: `own-${n}`});
  own.style.display = "contents";
  box.append(field("Sampler", sampler), field("Steps", steps), own);
  box.id = `of-sampler-${n}`;
  at(n ? "second" : "samplers").append(box);
  choices(`sampler-${n}`, Object.keys(model.samplers), model.sampler);
  choices(`steps-${n}`, model.steps, model.usual_steps);
  const offer = () => {
    if (own.dataset.of === sampler.value) return;
    own.dataset.of = sampler.value;
    own.replaceChildren(...Object.entries(model.samplers[sampler.value]).map(([key, values]) => {
      const isNumber = typeof values[0] === "number";
      const control = isNumber
        ? make("input", {type: "number", min: values[0], max: values[1], step: 0.01, value: 0.02})
        : make("select", {}, ...values.map(value => make("option", {value, text: spoken(value)})));
      control.id = `${key}-${n}`;
      if (!isNumber) control.dataset.usual = values[0];
      return field(NAMES[key] ?? key, control);
    }));
  };
  for (const kind of ["input", "change"]) sampler.addEventListener(kind, offer);
  offer();
}

function settings(n) {
  const found = {sampler: at(`sampler-${n}`).value, steps: +at(`steps-${n}`).value,
    temperature: +at("temperature").value, seed: Number(at("seed").value || 0)};
  for (const [key, values] of Object.entries(model.samplers[found.sampler])) {
    const {value} = at(`${key}-${n}`);
    found[key] = typeof values[0] === "number" ? Number(value || 0) : value;
  }
  if (!isImage) found.length = +at("length").value;
  if (model.labels.length) found.label = +at("label").value;
  if (model.guides && found.label >= 0) found.guidance = +at("guidance").value;
  return found;
}

function request(n) {
  if (!isImage) {
    return {...settings(n), text: written, hidden: [...hidden].sort((a, b) => a - b),
      continues: at("continues").checked ? 1 : 0};
  }
  if (!picture.values) return settings(n);
  const given = model.coded ? {codes: picture.values} : {picture: toBase64(picture.values)};
  return {...settings(n), ...given, hidden: toBase64(picture.cover)};
}

const CONTROLS = ["text", "temperature", "seed", "length", "label", "guidance"];

function keep() {
  if (!isRestored) return;
  const found = new URLSearchParams();
  for (const id of CONTROLS) {
    const control = at(id);
    if (control.value && control.value !== usual(control)) found.set(id, control.value);
  }
  if (hidden.size) found.set("hidden", [...hidden].sort((a, b) => a - b).join("."));
  for (const id of ["continues", "compare"]) if (at(id).checked) found.set(id, 1);
  for (const n of at("compare").checked ? [0, 1] : [0]) {
    const {sampler, steps} = settings(n);
    found.set(`sampler-${n}`, sampler);
    found.set(`steps-${n}`, steps);
    for (const key of Object.keys(model.samplers[sampler])) found.set(`${key}-${n}`, at(`${key}-${n}`).value);
  }
  if (isImage && !model.coded && picture.values && picture.values.length <= 4096) {
    found.set("picture", toBase64(picture.values));
    found.set("cover", toBase64(picture.cover));
  }
  history.replaceState(null, "", `#${found}`);
}

// Sets the controls to what a link says, and to their usual values where it says nothing, or what
// does not exist here. The hash of the link to the results says nothing at all.
async function restore() {
  if (isRestored && !location.hash.includes("=")) return;
  const found = new URLSearchParams(location.hash.slice(1));
  isRestored = true;
  const set = id => {
    const control = at(id);
    control.value = found.get(id) ?? usual(control);
    if (control.tagName === "SELECT" && !control.value) control.value = usual(control);
    control.dispatchEvent(new Event("change"));
  };
  const wanted = (found.get("hidden") ?? "").split(".").filter(n => /^\d+$/.test(n)).map(Number);
  for (const id of ["continues", "compare"]) at(id).checked = found.get(id) === "1";
  showSecond();
  for (const n of [0, 1]) {
    set(`sampler-${n}`);
    const own = Object.keys(model.samplers[at(`sampler-${n}`).value]);
    for (const key of ["steps", ...own]) set(`${key}-${n}`);
  }
  CONTROLS.forEach(set);
  showNumbers();
  if (!isImage) {
    hidden = new Set(wanted);
    await encode();
  } else {
    Object.assign(picture, {values: null, image: null});
    picture.cover.fill(0);
    try {
      const [values, cover] = ["picture", "cover"].map(name => fromBase64(found.get(name) ?? ""));
      if (values.length === model.length && cover.length === picture.cover.length) {
        picture.values = values;
        picture.cover = cover;
      }
    } catch { say("the picture in the link cannot be read", true); }
    drawPicture();
  }
}

function showNumbers() {
  for (const id of ["temperature", "guidance"]) at(`${id}-shown`).textContent = at(id).value;
}

function showSecond() { at("of-sampler-1").hidden = !at("compare").checked; }

// Filling in

function pane(n, asked) {
  const box = at(`pane-${n}`), title = make("h2", {id: `pane-title-${n}`});
  const own = Object.keys(model.samplers[asked.sampler]).map(key => asked[key]);
  const name = [spoken(asked.sampler), ...own.map(value => spoken(`${value}`))].join(", ");
  const rest = [amount(asked.steps, "step"), `temperature ${asked.temperature}`, `seed ${asked.seed}`];
  if (asked.label >= 0) rest.push(`class ${model.labels[asked.label]}`);
  if (asked.guidance !== undefined) rest.push(`guidance ${asked.guidance}`);
  title.append(name, make("span", {class: "soft", text: rest.join(", ")}));
  const progress = make("progress", {max: 1, value: 0, "aria-label": "Steps taken"});
  const holder = make("div"), result = make("p", {class: "result", hidden: ""});
  box.replaceChildren(title, progress, holder, result);
  box.setAttribute("aria-labelledby", title.id);
  box.hidden = false;
  const trace = new Trace(holder, {name: `sample-${asked.sampler}-${asked.seed}`});
  trace.title = `${name}, ${rest.join(", ")}`;
  trace.layout.value = panes[n]?.trace.layout.value ?? "grid";
  return {trace, progress, result};
}

// Yields the objects of a stream of JSON lines.
async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

async function fillOne(n, signal) {
  const asked = request(n);
  const answer = await ask("/api/sample", asked, signal);
  const own = panes[n] = pane(n, asked);
  for await (const message of lines(answer)) {
    signal.throwIfAborted();  // many lines come at once
    if (message.error) throw new Error(message.error);
    if (message.done) {
      own.progress.hidden = true;
      own.result.textContent = `${amount(message.evaluations, "call")} of the network, ` +
        `${message.seconds.toFixed(1)} seconds`;
      own.result.className = "result soft";
      own.result.hidden = false;
      if (isImage) {
        const symbols = own.trace.final();
        picture.last = model.coded
          ? [symbols, own.trace.frames.findLast(frame => frame.picture).picture]
          : symbols.map(symbol => model.values[symbol] ?? 0);
        at("take").disabled = false;
        return "the picture is drawn";
      }
      return message.text;
    }
    if (message.step > 0 && waiting) working();
    if (message.step === 0) {
      own.trace.open({...model, words: message.words, prompt: message.prompt, length: message.length});
    }
    const {step, changes, picture: address} = message;
    own.trace.push({step, changes, picture: address}, message.words);
    own.progress.value = message.step / message.of;
  }
  throw new Error("the connection was cut");
}

function working() {
  clearTimeout(waiting);
  waiting = 0;
  say("The model is at work…");
}

async function fill(event) {
  event?.preventDefault();
  stopping?.abort();
  const own = stopping = new AbortController();
  at("stop").disabled = false;
  at("empty").hidden = true;
  at("heat").hidden = true;
  at("pane-1").hidden = true;
  working();
  waiting = setTimeout(() => say("Compiling: a new sampler or length takes a while once…"), 3000);
  const which = at("compare").checked ? [0, 1] : [0];
  const wrong = isImage ? null : await encode();  // what was typed last has no tokens yet
  const ended = wrong ? [{status: "rejected", reason: wrong}]
    : await Promise.allSettled(which.map(n => fillOne(n, own.signal)));
  if (own !== stopping) return;
  clearTimeout(waiting);
  stopping = null;
  at("stop").disabled = true;
  const failed = ended.find(end => end.status === "rejected");
  if (own.signal.aborted) say("Stopped.");
  else if (failed) say(failed.reason.message, true);
  else say("Done", false, `: ${ended.map(end => end.value).join(" / ")}`);
}

// Costs of tokens

const heat = {spans: [], found: null};

async function showCosts() {
  say("The model is at work…");
  try {
    const asked = {text: at("text").value};
    if (model.labels.length) asked.label = +at("label").value;
    const found = heat.found = await (await ask("/api/costs", asked)).json();
    const most = Math.max(...found.bits, 1e-9);
    heat.spans = found.tokens.map((word, n) => {
      const span = make("span", {text: word.endsWith(BREAK) ? `${word}\n` : word});
      const part = Math.round(100 * Math.max(0, found.bits[n]) / most);
      span.style.background = `color-mix(in srgb, var(--heat) ${part}%, var(--paper))`;
      return span;
    });
    at("heat-tokens").replaceChildren(...heat.spans);
    const each = found.total / found.bits.length, error = found.total_error / found.bits.length;
    const kind = found.exact ? "the exact cost" : "an upper bound of the cost";
    const margin = found.exact ? "" : ` ± ${error.toFixed(2)}`;
    at("heat-said").textContent = `${each.toFixed(2)}${margin} bits per ${model.unit.slice(0, -1)}, ` +
      `${found.total.toFixed(1)} bits in all: ${kind}, −log₂ p.`;
    at("heat-most").textContent = `${most.toFixed(1)} bits`;
    at("heat-detail").textContent = "Point at a token, or use the arrow keys.";
    at("heat").hidden = false;
    at("empty").hidden = true;
    say("Done", false, `: ${at("heat-said").textContent}`);
  } catch (error) {
    say(error.message, true);
  }
}

function listenToCosts() {
  at("costs").addEventListener("click", showCosts);
  navigable(at("heat-tokens"), {count: () => heat.spans.length,
    rowOf: (n, by) => rowAmong(heat.spans, n, by),
    place: event => {
      const n = heat.spans.indexOf(event.target);
      return n < 0 ? undefined : n;
    },
    choose: (n, byKey) => {
      for (const span of heat.spans) span.classList.remove("here");
      if (byKey) heat.spans[n]?.classList.add("here");
      if (n < 0) return;
      const {tokens: words, bits, errors, exact} = heat.found;
      const margin = exact ? "" : ` ± ${errors[n].toFixed(2)}`;
      at("heat-detail").textContent =
        `Position ${n}, ${JSON.stringify(words[n])}: ${bits[n].toFixed(2)}${margin} bits`;
    }});
}

async function copyLink() {
  keep();
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is copied. It holds the text and all settings.");
  } catch {
    say("The link is in the address bar: copy it from there.");
  }
}

async function begin() {
  model = await (await ask("/api/model")).json();
  isImage = model.kind === "image";
  document.title = `Playground: ${model.name}`;
  const size = model.parameters >= 1e6 ? `${(model.parameters / 1e6).toFixed(1)} million`
    : model.parameters.toLocaleString("en");
  const shape = isImage ? model.picture.join(" × ") : `${model.length} ${model.unit}`;
  at("model").textContent = `${model.name} · ${size} parameters · step ` +
    `${model.step.toLocaleString("en")} · ${shape}`;
  at(isImage ? "of-image" : "of-text").hidden = false;
  at("unit").textContent = model.unit;
  at("costs").hidden = !model.costs;
  at("heat-title").textContent = `Bits per ${model.unit.slice(0, -1)}`;
  at("costs").textContent = `Show bits per ${model.unit.slice(0, -1)}`;
  choices("length", model.lengths, model.length);
  at("length-unit").textContent = `Length, ${model.unit}`;
  at("length-field").hidden = isImage;
  at("label").replaceChildren(make("option", {value: -1, text: "any"}),
    ...model.labels.map((text, value) => make("option", {value, text})));
  at("label").dataset.usual = "-1";
  at("label-field").hidden = !model.labels.length;
  at("guidance-field").hidden = !model.guides;
  for (const n of [0, 1]) samplerFields(n);
  if (isImage) listenToPicture(); else listenToText();
  listenToCosts();
  at("form").addEventListener("submit", fill);
  at("form").addEventListener("input", () => { showNumbers(); keep(); });
  at("stop").addEventListener("click", () => stopping?.abort());
  at("link").addEventListener("click", copyLink);
  at("next").addEventListener("click", () => { at("seed").value = +at("seed").value + 1; keep(); });
  at("compare").addEventListener("change", showSecond);
  at("length").addEventListener("change", count);
  at("text").addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) fill(event);
  });
  addEventListener("hashchange", restore);
  await restore();
  document.body.dataset.ready = "yes";
}

begin().catch(error => say(error.message, true));
