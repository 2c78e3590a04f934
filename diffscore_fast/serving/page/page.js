"use strict";
// Texts are inserted as text: by textContent alone, never as markup.

const EDGES = [-0.5, -2, -4, -6, -8, -10]; // as in the heat map of `diffscore score`
const DIFFERENCES = [1, 0.25, 0, -0.25, -1, -4]; // of pmi: what the source adds
const MAX_PROFILES = 4;
const $ = (id) => document.getElementById(id);
const lines = (id) => $(id).value.split("\n").map((line) => line.trim()).filter((line) => line);
const paired = (id) => $(id).value.trimEnd().split("\n"); // a blank line is a row: lines of other fields belong to it

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

async function ask(path, body) {
  const answer = await fetch(path, body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error.message);
  return found;
}

const shown = (value, digits = 3) => (value === null ? "–" : value.toFixed(digits));

function heatMap(text, tokens, edges) {
  const characters = Array.from(text); // the service counts code points
  const cell = element("td", { className: "text" });
  let done = 0;
  for (const { start, end, score } of tokens) {
    const from = Math.max(start, done);
    if (from > done) cell.append(characters.slice(done, from).join(""));
    if (end > from) {
      const step = edges.filter((edge) => score < edge).length;
      cell.append(element("span", {
        className: score === null ? "none" : `s${step}`,
        title: score === null ? "never masked: no score" : `${score.toFixed(3)} nats`,
        textContent: characters.slice(from, end).join(""),
      }));
      done = end;
    }
  }
  cell.append(characters.slice(done).join(""));
  return cell;
}

function legend(edges, difference) {
  const names = [`from ${edges[0]}`, ...edges.slice(1).map((low, index) => `${edges[index]} to ${low}`), `below ${edges.at(-1)}`];
  const what = difference ? "What the source adds to a token (nats): " : "Mean log-prob of a token when masked (nats): ";
  $("legend").replaceChildren(what, ...names.map((name, step) => element("span", { className: `s${step}`, textContent: name })));
}

function drawing(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function profile(ratios, results) {
  const curves = results.slice(0, MAX_PROFILES).map((row) => row.profile);
  const values = curves.flat().filter((value) => value !== null);
  if (!values.length) { $("profile").replaceChildren(); $("profile-caption").textContent = ""; return; }
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (ratio) => 48 + 580 * ratio;
  const y = (value) => 16 + 184 * (high === low ? 0.5 : (high - value) / (high - low));
  const parts = [
    drawing("line", { class: "axis", x1: 48, x2: 628, y1: 206, y2: 206 }),
    drawing("line", { class: "axis", x1: 48, x2: 48, y1: 10, y2: 206 }),
    drawing("text", { x: 4, y: y(high) + 4 }, high.toFixed(2)),
    drawing("text", { x: 4, y: y(low) + 4 }, low.toFixed(2)),
  ];
  for (const ratio of [0, 0.5, 1]) parts.push(drawing("text", { x: x(ratio) - 8, y: 224 }, ratio.toFixed(1)));
  curves.forEach((curve, index) => {
    const points = curve.map((value, level) => (value === null ? null : `${x(ratios[level])},${y(value)}`)).filter((point) => point);
    parts.push(drawing("polyline", { class: `c${index}`, points: points.join(" ") }));
  });
  $("profile").replaceChildren(...parts);
  $("profile-caption").textContent = `Mean log-prob by mask ratio (nats per token), candidates 1 to ${curves.length}`;
}

async function score() {
  const source = $("source").value, candidates = lines("candidates"), direction = $("direction").value;
  const rows = candidates.map((candidate) => ({ source, candidate }));
  const options = { direction, draws: Number($("draws").value) };
  const found = await ask("/v1/scores", { rows, options, token_scores: true, profile: true });
  const difference = direction === "pmi", edges = difference ? DIFFERENCES : EDGES;
  $("rows").replaceChildren(...found.results.map((row, index) => {
    const cell = heatMap(candidates[index], row.token_scores, edges);
    if (index < MAX_PROFILES) cell.prepend(element("span", { className: `mark c${index}`, ariaHidden: "true" }));
    if (row.message) cell.append(element("div", { className: "failed", textContent: `${row.status}: ${row.message}` }));
    return element("tr", {}, cell, element("td", { textContent: shown(row.score) }), element("td", { textContent: shown(row.stderr) }));
  }));
  legend(edges, difference);
  profile(found.profile_ratios, found.results);
  $("signature").textContent = `signature ${found.signature}`;
  $("score-result").hidden = false;
  return `${found.results.length} candidates, ${found.kind}, ${found.unit}; closer to 0 is better`;
}

async function compare() {
  const found = await ask("/v1/compare", { sources: paired("sources"), a: paired("a"), b: paired("b") });
  const facts = [
    ["Mean of A", shown(found.mean_a)],
    ["Mean of B", shown(found.mean_b)],
    ["A - B", `${shown(found.difference)} [${shown(found.low)}, ${shown(found.high)}], ${100 * found.confidence} % interval`],
    ["p-value", shown(found.p_value, 4)],
    ["Rows", `${found.rows}: A better in ${found.wins_a}, B better in ${found.wins_b}, equal in ${found.ties}`],
  ];
  for (const [reason, count] of Object.entries(found.excluded)) facts.push(["Left out", `${count}, ${reason}`]);
  $("compare-result").replaceChildren(...facts.flatMap(([name, value]) => [
    element("dt", { textContent: name }), element("dd", { textContent: value }),
  ]));
  $("signature").textContent = `signature ${found.signature}`;
  $("compare-result").hidden = false;
  return found.unit;
}

function connect(name, work) {
  const form = $(`${name}-form`), message = $(`${name}-message`), button = form.querySelector("button");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    message.className = "quiet";
    message.textContent = "…";
    try {
      message.textContent = await work();
    } catch (error) {
      message.className = "failed";
      message.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !button.disabled) form.requestSubmit();
  });
}

connect("score", score);
connect("compare", compare);
ask("/info").then((info) => { $("model").textContent = `model ${info.model} on ${info.device}, version ${info.version}`; });
