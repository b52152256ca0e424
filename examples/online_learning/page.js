"use strict";
// Whatever comes from the service is shown as text, never as markup.
const at = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const RETRY_MS = 1000, MAX_POINTS = 240, MAX_VERSIONS = 50, SILENCE_MS = 40000;
const SHOWN = ["figures", "accuracies", "losses", "rates", "versions", "challengers"];  // not news while disconnected
let points = [], told = null, numDead = -1, sent = null, token = "", shownAt = null, wake = () => {};

function headers() {
  return token ? {authorization: `Bearer ${token}`} : {};
}

async function ask(path, body, more = {}) {
  const options = {headers: {...headers(), ...more}};
  if (body !== undefined) {
    Object.assign(options, {method: "POST", body: JSON.stringify(body)});
    options.headers["content-type"] = "application/json";
  }
  const answer = await fetch(path, options), found = await answer.json();
  if (answer.status === 401 && !more.authorization) {
    at("access").hidden = false;
    const text = token ? "The service does not take this token." : "";
    if (at("refused").textContent !== text) at("refused").textContent = text; // else it is read out again
  }
  if (!answer.ok) {
    throw new Error([found.error, ...(found.reasons ?? []).map(each => `${each.where} ${each.what}`)].join("\n"));
  }
  return found;
}

// ---- following: connect, read events, connect again --------------------------------------

async function follow() {
  for (;;) {
    const stop = new AbortController();
    let silence;
    const heard = () => { clearTimeout(silence); silence = setTimeout(() => stop.abort(), SILENCE_MS); };
    try {
      await begin();
      const answer = await fetch("events", {headers: headers(), signal: stop.signal});
      if (!answer.ok) throw new Error(answer.statusText);
      setStatus("live", true);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      heard();
      for (let text = "";;) {
        const {value, done} = await reader.read();
        if (done) break;
        heard();
        const parts = (text + value).split("\n\n");
        text = parts.pop();
        for (const part of parts) {
          const data = part.split("\n").find(line => line.startsWith("data: "));
          if (data) show(JSON.parse(data.slice(6)));
        }
      }
    } catch (error) {
      if (error instanceof SyntaxError) console.warn(error.message);
    }
    clearTimeout(silence);
    const old = shownAt ? `; figures of ${shownAt.toLocaleTimeString()}` : "";
    setStatus(at("access").hidden ? `not connected, trying again${old}` : "a token is needed", false);
    for (const id of SHOWN) at(id).classList.toggle("stale", shownAt !== null);
    await new Promise(resume => { wake = resume; setTimeout(resume, RETRY_MS); });
  }
}

async function begin() {
  const found = await ask("history");
  points = found.points;
  at("access").hidden = true;
  at("operating").hidden = !found.operates;
  if (!at("features").querySelector("label")) found.features.forEach(addFeature);
  numDead = -1;
}

function setStatus(text, isLive) {
  at("status").textContent = text;
  at("status").classList.toggle("live", isLive);
}

// ---- showing ------------------------------------------------------------------------------

function show(state) {
  const {point, replay} = state.report, now = state.statistics;
  if (point && point.number !== points.at(-1)?.number) points = [...points, point].slice(-MAX_POINTS);
  const percent = share => share == null ? "–" : `${(100 * share).toFixed(1)} %`;
  const texts = {
    accuracy: percent(point?.accuracy), river: percent(replay.river),
    loss: point ? point.loss.toFixed(3) : "–", rate: point ? point.rate.toFixed(0) : "–",
    queue: now.queue_depth + now.backlog, learned: now.learned_number, version: state.version,
  };
  for (const [id, text] of Object.entries(texts)) at(id).textContent = text;
  const problem = now.failure || now.journal_error || now.checkpoint_error;
  setStatus(problem ? `live, but ${problem}` : now.state === "running" ? "live" : `live, ${now.state}`, !problem);
  shownAt = new Date();
  for (const id of SHOWN) at(id).classList.remove("stale");
  showDrift(now);
  at("anew").hidden = !replay.began_at_version;
  at("anew").textContent = `River's model began at nothing when this service was at version ` +
    `${replay.began_at_version}, and has learned ${replay.seen} examples since.`;
  draw("accuracies", [["first", "accuracy"], ["second", "river"]], [0, 1], value => `${100 * value} %`);
  draw("losses", [["first", "loss"]], [0, null], value => value.toFixed(2));
  draw("rates", [["first", "rate"]], [0, null], value => value.toFixed(value < 10 ? 1 : 0));
  showVersions(state.steps, now);
  showModels(now);
  if (now.num_dead !== numDead) showLetters(numDead = now.num_dead);
}

function showDrift({num_drifts: count, drift_number: number}) {
  at("drift").textContent = count ? `drift seen ${count} times, last at example ${number}` : "no drift seen";
  at("drift").classList.toggle("has-drift", count > 0);
  if (told !== null && number && number !== told && points.length) points.at(-1).drifted = true;
  told = number;
}

function element(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
}

function draw(id, curves, [low, high], label) {
  const svg = at(id), width = svg.clientWidth, height = svg.clientHeight, left = 48, foot = 8;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const known = curves.flatMap(([, key]) => points.map(point => point[key]).filter(value => value != null));
  const top = high ?? (Math.max(...known, 0) * 1.1 || 1);
  const x = i => left + (width - left - 4) * i / Math.max(points.length - 1, 1);
  const y = value => foot + (height - 2 * foot) * (1 - (value - low) / (top - low));
  for (const value of [low, (low + top) / 2, top]) {
    element(svg, "line", {class: "grid", x1: left, x2: width, y1: y(value), y2: y(value)});
    element(svg, "text", {x: 0, y: y(value) + 4}, label(value));
  }
  points.forEach((point, i) => {
    if (point.drifted) element(svg, "line", {class: "drifted", x1: x(i), x2: x(i), y1: 0, y2: height});
  });
  for (const [kind, key] of curves) {
    const line = points.map((point, i) => point[key] == null ? null : `${x(i)},${y(point[key])}`);
    element(svg, "polyline", {class: kind, points: line.filter(Boolean).join(" ")});
    const last = points.findLast(point => point[key] != null);
    if (last) element(svg, "circle", {class: kind, cx: x(points.lastIndexOf(last)), cy: y(last[key]), r: 3});
  }
}

function showVersions(steps, now) {
  for (const step of steps) {
    const row = at("versions").insertRow(0);
    for (const text of [step.version, step.last_number, step.held || "let through"]) row.insertCell().textContent = text;
    row.classList.toggle("held", Boolean(step.held));
  }
  while (at("versions").rows.length > MAX_VERSIONS) at("versions").deleteRow(-1);
  const parts = [`serving version ${now.version}${now.is_pinned ? ", pinned" : ""}`, `newest ${now.newest_version}`];
  if (now.held) parts.push(`held back: ${now.held}`);
  if (now.generation) parts.push(`rollbacks so far: ${now.generation}`);
  if (now.rollback_from !== null) parts.push(`one can roll back to example ${now.rollback_from}`);
  at("serving").textContent = parts.join("; ");
}

function showModels(now) {
  const models = [now, ...Object.values(now.challengers)], broken = Object.entries(now.not_open);
  at("challengers").hidden = models.length + broken.length < 2;
  const rows = models.map(each => [
    each.model, each.model === now.champion ? "served" : each.detached || each.failure || each.state,
    each.num_learned, each.lag,
    Object.entries(each.figures).map(([name, value]) => `${name} ${value.toFixed(3)}`).join(", ") || "–",
  ]).concat(broken.map(([name, why]) => [name, why, "–", "–", "–"]));
  while (at("models").rows.length > rows.length) at("models").deleteRow(-1);
  rows.forEach((texts, i) => {  // rows stay, so that a button keeps the focus
    const row = at("models").rows[i] ?? at("models").insertRow();
    texts.forEach((text, k) => { (row.cells[k] ?? row.insertCell()).textContent = text; });
    const cell = row.cells[texts.length] ?? row.insertCell();
    const may = !at("operating").hidden && i < models.length && texts[0] !== now.champion;
    if (may && cell.dataset.model !== texts[0]) addPromotion(cell, texts[0]);
    if (!may) { cell.replaceChildren(); delete cell.dataset.model; }
  });
}

function addPromotion(cell, name) {
  const button = document.createElement("button");
  button.textContent = "Promote";
  button.setAttribute("aria-label", `Promote ${name}`);
  button.onclick = async () => {
    await operate("promote", {model: name});
    at("promoted").textContent = at("done").textContent;
  };
  cell.dataset.model = name;
  cell.replaceChildren(button);
}

async function showLetters(count) {
  if (!count) return;
  try {
    const found = (await ask("dead-letters")).dead_letters;
    at("letters").replaceChildren();
    for (const letter of found.slice(-50).reverse()) {
      const row = at("letters").insertRow();
      row.insertCell().textContent = `${letter.number}`;
      row.insertCell().textContent = letter.error;
      if (!at("operating").hidden) addActions(row.insertCell(), letter.number);
      row.title = JSON.stringify(letter.example);
    }
  } catch (error) {
    numDead = -1;
  }
}

// ---- operating ------------------------------------------------------------------------------

async function operate(name, body = {}) {
  try {
    const found = await ask(name, body, {authorization: `Bearer ${at("operator").value}`});
    const missing = found.missing?.length ? `, but ${found.missing.join(", ")} was none` : "";
    at("done").textContent = `${name}: done${missing}; the learner is ${found.state}, serving version ${found.version}.`;
  } catch (error) {
    at("done").textContent = `${name}: ${error.message}`;
  }
}

function addActions(cell, number) {
  for (const name of ["retry", "discard"]) {
    const button = document.createElement("button");
    button.textContent = name === "retry" ? "Retry" : "Discard";
    button.onclick = async () => { await operate(name, {numbers: [number]}); showLetters(1); };
    cell.append(button);
  }
}

for (const button of at("operating").querySelectorAll("[data-do]")) {
  button.onclick = () => operate(button.dataset.do);
}

at("operating").onsubmit = event => {
  event.preventDefault();
  const skip = at("skip").value.split(/[ ,]+/).filter(Boolean).map(Number);
  operate("rollback", {to: at("to").valueAsNumber, skip});
};

// ---- the form -------------------------------------------------------------------------------

function addFeature(name) {
  const label = document.createElement("label"), select = document.createElement("select");
  for (const value of ["0", "0.5", "1"]) select.add(new Option(value));
  label.append(name.replaceAll("_", " "), select);
  at("features").append(label);
}

at("try").onsubmit = async event => {
  event.preventDefault();
  at("problem").textContent = "";
  const input = [...at("features").querySelectorAll("select")].map(each => Number(each.value));
  try {
    const found = await ask("predict", {input}), likely = found.prediction.phishing;
    at("prediction").textContent =
      `${likely > .5 ? "Phishing" : "Honest"}, ${(100 * Math.max(likely, 1 - likely)).toFixed(0)} % sure (version ${found.version})`;
    sent = input;
    at("correct").disabled = false;
  } catch (error) {
    at("problem").textContent = error.message;
  }
};

for (const button of at("correct").querySelectorAll("button")) {
  button.onclick = async () => {
    at("problem").textContent = "";
    const key = [...crypto.getRandomValues(new Uint8Array(12))].map(each => each.toString(16).padStart(2, "0")).join("");
    try {
      const taken = await ask("learn", {input: sent, target: Number(button.dataset.target)}, {"idempotency-key": key});
      at("prediction").textContent = `Taken as example ${taken.number}, thank you.`;
    } catch (error) {
      at("problem").textContent = error.message;
    }
  };
}

at("access").onsubmit = event => {
  event.preventDefault();
  token = at("token").value;
  wake();
};

follow();
