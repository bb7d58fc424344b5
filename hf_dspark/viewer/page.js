"use strict";
// Everything that a model wrote enters the page through `textContent`.
const { recordings, stretches } = JSON.parse(document.getElementById("data").textContent);
const PARTS = { draft: "draft", head: "heads", verify: "verify", rest: "rest" };
const FATES = {
  accepted: "drafted and accepted", rejected: "drafted and rejected", unjudged: "drafted, behind a rejected token",
  cut: "drafted, cut by the scheduler", own: "the target’s own",
};
const byId = (id) => document.getElementById(id);
const percent = (share) => `${share < 0.0995 && share > 0 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key === "width") made.style.width = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Rounds as slots: every drafted token, then the target's own.

function slotsOf(recording, round) {
  const accepted = round.accepted + round.ended;
  const fate = (k) => {
    if (k < accepted) return "accepted";
    if (k >= round.verified) return "cut";
    return k === accepted && !round.ended ? "rejected" : "unjudged";
  };
  let survival = 1;
  const slots = round.drafted.map((token, k) => {
    const confidence = round.confidence[k] ?? null;
    survival *= confidence ?? 1;
    return { token, k, fate: fate(k), confidence, survival, drafter: round.drafter[k], target: round.target[k] };
  });
  if (!round.ended) {
    const k = round.accepted;
    slots.push({ token: round.token, k, fate: "own", confidence: null, drafter: round.drafter[k], target: round.target[k] });
  }
  return slots;
}

for (const recording of recordings) {
  recording.slotsOf = recording.rounds.map((round) => slotsOf(recording, round));
  recording.took = recording.rounds.map((round) => sum(Object.values(round.seconds)));
  const sorted = [...recording.took].sort((a, b) => a - b);
  recording.scale = sorted[Math.floor(0.97 * (sorted.length - 1))] || 1; // a slow round does not dwarf the others
  recording.origin = [null]; // of each token of the answer: its round and slot; the first is from the prompt's pass
  recording.slotsOf.forEach((slots, round) =>
    slots.forEach((slot, k) => (slot.fate === "accepted" || slot.fate === "own") && recording.origin.push([round, k])));
  recording.current = [0, 0];
  recording.cells = [];
  recording.marks = new Map(); // of each round, the slots that the search found
}

// Panels

function panel(recording, side) {
  const seconds = sum(recording.took), drafted = sum(recording.rounds.map((round) => round.drafted.length));
  const verified = sum(recording.rounds.map((round) => round.verified));
  const accepted = sum(recording.rounds.map((round) => round.accepted + round.ended));
  const numbers = [
    ["tokens a round", recording.acceptance_length.toFixed(2)], ["tokens", recording.answer.length],
    ["rounds", recording.rounds.length], ["drafted", drafted],
    ["accepted", accepted, verified ? percent(accepted / verified) : ""], ["cut", drafted - verified],
    ["a round", `${((1000 * seconds) / recording.rounds.length || 0).toFixed(1)} ms`],
  ].map(([name, value, more]) => element("div", {}, element("dt", {}, name), element("dd", {}, `${value} `, element("small", {}, more ?? ""))));
  return element("article", { class: "panel" },
    recordings.length > 1 ? element("h2", {}, recording.label) : null,
    element("dl", { class: "numbers" }, ...numbers),
    element("div", { class: "columns" }, answer(recording, side), byPosition(recording), timeline(recording, side)));
}

// Line breaks and tabulators get a sign; an override of the direction gets one, and ends with it.
function unseen(text) {
  if (text === "\n" || text === "\t") return element("span", { class: text === "\n" ? "break" : "tab" }, text);
  if (!/^[\u202a-\u202e\u2066-\u2069]$/.test(text)) return text;
  return element("span", { class: "byte", "data-shown": `U+${text.charCodeAt(0).toString(16).toUpperCase()}` }, text);
}

function answer(recording, side) {
  const text = element("div", { class: "answer", dir: "auto", tabindex: "0", role: "region", "aria-label": "The answer" });
  recording.spans = recording.pieces.map((piece, place) => {
    const origin = recording.origin[place];
    const span = element("span", { class: origin ? recording.slotsOf[origin[0]][origin[1]].fate : "own", "data-side": side, "data-place": place });
    if (piece === "") {
      span.classList.add("byte");
      span.dataset.shown = recording.shown[recording.answer[place]];
    } else if (/^\s+$/.test(piece)) {
      span.append(...[...piece].map((one) => (/[\n\t]/.test(one) ? unseen(one) : element("span", { class: "space" }, one))));
    } else span.append(...piece.split(/([\n\t\u202a-\u202e\u2066-\u2069])/).filter(Boolean).map(unseen));
    return span;
  });
  text.append(...recording.spans);
  return text;
}

function byPosition(recording) {
  const rows = recording.conditional.flatMap((share, k) => [
    element("span", { class: "of" }, k + 1),
    element("span", { class: "bar" }, share === null ? "" : element("i", { width: `${100 * share}%` })),
    element("b", { title: `of ${recording.judged[k]} that were judged, all before them accepted` }, share === null ? "–" : percent(share)),
  ]);
  return element("div", {}, element("h3", {}, "Acceptance by position"), element("div", { class: "bars" }, ...rows));
}

function timeline(recording, side) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const count = recording.rounds.length, height = 100;
  const tallest = Math.max(...recording.took, 1e-9), top = Math.min(tallest, 1.6 * recording.scale);
  const shapes = Object.fromEntries(Object.keys(PARTS).map((part) => [part, ""]));
  recording.rounds.forEach((round, k) => {
    let bottom = 0;
    for (const part of Object.keys(PARTS)) {
      const tall = Math.min((height * round.seconds[part]) / top, height - bottom);
      shapes[part] += `M${k + 0.06} ${height - bottom}h.88v${-tall.toFixed(2)}h-.88z`;
      bottom += tall;
    }
  });
  svg.setAttribute("class", "timeline");
  svg.setAttribute("viewBox", `0 0 ${Math.max(count, 1)} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Time of each round");
  for (const part of [...Object.keys(PARTS), "cursor"]) {
    const path = document.createElementNS(svg.namespaceURI, "path");
    path.setAttribute("class", part);
    path.setAttribute("d", shapes[part] ?? "");
    svg.append(path);
  }
  recording.cursor = svg.lastChild;
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    select(side, Math.min(Math.floor(((event.clientX - box.left) / box.width) * count), count - 1), 0);
  });
  const whole = sum(recording.took) || 1;
  const shares = Object.entries(PARTS).map(([part, name]) => element("span", {}, element("i", { class: part }),
    `${name} ${percent(sum(recording.rounds.map((round) => round.seconds[part])) / whole)}`));
  return element("div", { class: "time" }, element("h3", {}, "Time of each round"), svg, element("div", { class: "parts" }, ...shares));
}

// Rows: a round each, or, side by side, a stretch of text that both made in whole rounds. Filled when near.

function token(recording, slot) {
  return element("bdi", { class: `token ${slot.fate}` }, recording.shown[slot.token]);
}

function cell(recording, side, number, k, slot) {
  const confidence = slot.confidence === null ? "" : `, confidence ${percent(slot.confidence)}`;
  return element("div", {
    class: "slot", tabindex: "-1", role: "button", "data-side": side, "data-round": number, "data-slot": k,
    "aria-label": `${recording.shown[slot.token]}, ${FATES[slot.fate]}${confidence}`,
  }, element("div", { class: "line" }, token(recording, slot), slot.confidence === null ? null : element("span", { class: "share" }, Math.round(100 * slot.confidence))),
  slot.confidence === null ? null : element("span", { class: "meter" }, element("i", { width: `${100 * slot.confidence}%` }), element("b", { width: `${100 * slot.survival}%` })));
}

function row(recording, side, number) {
  const round = recording.rounds[number], cells = recording.slotsOf[number].map((slot, k) => cell(recording, side, number, k, slot));
  const drafted = cells.slice(0, round.drafted.length);
  const stack = Object.keys(PARTS).map((part) => element("i", { class: part, width: `${(100 * round.seconds[part]) / Math.max(recording.scale, recording.took[number])}%` }));
  recording.cells[number] = cells;
  const stopped = round.confidence[round.drafted.length]; // of the token that the scheduler did not let be drafted
  const stop = stopped === undefined ? null : element("span", { class: "none" }, `stopped at ${percent(stopped)}`);
  const made = element("div", { class: "round", id: `round-${side}-${number}` },
    element("span", { class: "number" }, number + 1),
    drafted.length ? element("div", { class: "slots" }, ...drafted, stop) : stop ?? element("span", { class: "none" }, "no draft"),
    element("div", { class: "says" }, cells[round.drafted.length] ?? element("span", { class: "none" }, "the end")),
    element("div", { class: "took" }, element("div", { class: "stack" }, ...stack), `${(1000 * recording.took[number]).toFixed(1)} ms`));
  made.style.setProperty("--slots", Math.min(recording.slots || 1, 8));
  mark(side, number);
  return made;
}

let rows; // what each row holds: for each side its first round and the one behind its last
if (stretches) rows = stretches.map(({ left, right }) => [left, right]);
else rows = recordings.flatMap((recording, side) => recording.rounds.map((_, k) => recordings.map((_, other) => (other === side ? [k, k + 1] : [0, 0]))));
const shells = rows.map((_, index) => element("div", { class: "stretch", "data-row": index }));
const rowOf = recordings.map(() => []);
rows.forEach((sides, index) => sides.forEach(([first, stop], side) => {
  for (let number = first; number < stop; number++) rowOf[side][number] = index;
}));

function fill(index) {
  const shell = shells[index];
  if (shell.firstChild) return;
  rows[index].forEach(([first, stop], side) => {
    if (!stretches && first === stop) return;
    const made = [];
    for (let number = first; number < stop; number++) made.push(row(recordings[side], side, number));
    shell.append(element("div", { class: "side", ...(stretches && { "data-name": recordings[side].label }) }, ...made));
  });
  recordings.forEach((recording, side) => {
    if (rowOf[side][recording.current[0]] === index) recording.cells[recording.current[0]][recording.current[1]].tabIndex = 0;
  });
}

// Selection

function select(side, number, k, focus = true) {
  const recording = recordings[side], [before, slot] = recording.current;
  if (!recording.rounds[number]) return;
  fill(rowOf[side][number]);
  recording.cells[before]?.[slot] && (recording.cells[before][slot].tabIndex = -1);
  recording.cells[before]?.[0]?.closest(".round").classList.remove("here");
  for (const span of recording.spans) span.classList.remove("here");
  k = Math.max(0, Math.min(k, recording.cells[number].length - 1));
  recording.current = [number, k];
  const cell = recording.cells[number][k];
  cell.tabIndex = 0;
  cell.closest(".round").classList.add("here");
  recording.origin.forEach((origin, place) => origin?.[0] === number && recording.spans[place].classList.add("here"));
  recording.cursor.setAttribute("d", `M${number} 0h1v6h-1z`);
  if (!focus) return;
  cell.focus({ preventScroll: true });
  cell.scrollIntoView({ block: "nearest" });
  const box = cell.getBoundingClientRect();
  if (box.top < 70 || box.bottom > innerHeight - 20) cell.scrollIntoView({ block: "center" });
}

// The card

function list(title, kind, some, recording, slot) {
  const items = some.map(([id, share]) => element("li", { class: id === slot.token ? "this" : "" },
    element("i", { width: `${100 * share}%` }), element("bdi", {}, recording.shown[id]), element("span", {}, percent(share))));
  return element("div", { class: kind }, element("h3", {}, title), element("ol", {}, ...items));
}

function show(at, side, number, k) {
  const card = byId("card"), recording = recordings[side], slot = recording.slotsOf[number][k];
  const round = recording.rounds[number];
  const what = element("p", { class: "what" }, `Round ${number + 1}, position ${slot.k + 1}: ${FATES[slot.fate]}`);
  if (slot.fate === "rejected") what.append("; the target said ", element("b", {}, element("bdi", {}, recording.shown[round.token])), " instead");
  if (slot.confidence !== null) what.append(". Confidence ", element("b", {}, percent(slot.confidence)), ", survival ", element("b", {}, percent(slot.survival)));
  const given = slot.fate === "unjudged" ? "Target, had the draft stood" : "Target";
  card.replaceChildren(element("div", {}, token(recording, slot), element("span", { class: "id" }, `token ${slot.token}`)), what,
    element("div", { class: "both" },
      slot.drafter ? list("Drafter", "ours", slot.drafter, recording, slot) : null,
      slot.target ? list(given, "theirs", slot.target, recording, slot) : null));
  place(card, at);
}

function place(card, at) {
  card.hidden = false;
  const box = at.getBoundingClientRect(), own = card.getBoundingClientRect();
  const below = box.bottom + 8 + own.height < innerHeight;
  card.style.top = `${Math.max(8, below ? box.bottom + 8 : box.top - own.height - 8)}px`;
  card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
}

function pointed(event) {
  const slot = event.target.closest?.(".slot"), span = event.target.closest?.(".answer > span");
  if (slot?.dataset.side) return [slot, +slot.dataset.side, +slot.dataset.round, +slot.dataset.slot];
  const origin = span && recordings[span.dataset.side].origin[span.dataset.place];
  return origin ? [span, +span.dataset.side, ...origin] : null;
}

const hide = () => { byId("card").hidden = true; };
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, (event) => {
  const found = pointed(event);
  if (found) show(...found);
  else if (kind === "pointerover" && !document.activeElement?.closest(".slot")) hide();
});
document.addEventListener("focusout", hide);
document.addEventListener("scroll", () => { if (!document.activeElement?.closest(".slot")) hide(); }, { passive: true });
document.addEventListener("click", (event) => {
  const found = pointed(event);
  if (found) select(...found.slice(1));
});

// Search: in the answers and in what was drafted.

let found = [], foundAt = -1;

/** Which of some texts, read as one, a query lies in. */
function hitsIn(texts, query) {
  const pieces = texts.map((text) => text.toLowerCase()); // which may change their length
  const text = pieces.join(""), hits = new Set();
  let k = 0, start = 0;
  for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + query.length)) {
    while (start + pieces[k].length <= at) start += pieces[k++].length;
    for (let end = start, other = k; end < at + query.length; end += pieces[other++].length) hits.add(other);
  }
  return hits;
}

function mark(side, number) {
  recordings[side].cells[number]?.forEach((cell, k) => cell.classList.toggle("hit", recordings[side].marks.get(number)?.has(k) ?? false));
}

function search() {
  const query = byId("search").value.toLowerCase();
  found = recordings.flatMap((recording, side) => {
    const inAnswer = query ? hitsIn(recording.pieces, query) : new Set();
    recording.spans.forEach((span, place) => span.classList.toggle("hit", inAnswer.has(place)));
    recording.marks = new Map();
    const add = (number, k) => recording.marks.set(number, (recording.marks.get(number) ?? new Set()).add(k));
    for (const place of inAnswer) if (recording.origin[place]) add(...recording.origin[place]);
    if (query) recording.rounds.forEach((round, number) => {
      for (const k of hitsIn(round.drafted.map((id) => recording.vocabulary[id]), query)) add(number, k);
    });
    recording.cells.forEach((_, number) => mark(side, number));
    return [...recording.marks.keys()].sort((a, b) => a - b).map((number) => [side, number]);
  });
  foundAt = -1;
  tell();
}

function tell() {
  const count = `${found.length} round${found.length === 1 ? "" : "s"}`;
  byId("found").textContent = byId("search").value ? (foundAt < 0 ? count : `${foundAt + 1} of ${count}`) : "";
}

function next(step) {
  if (!found.length) return;
  foundAt = foundAt < 0 ? (step > 0 ? 0 : found.length - 1) : (foundAt + step + found.length) % found.length;
  const [side, number] = found[foundAt];
  select(side, number, 0, false);
  recordings[side].cells[number][0].scrollIntoView({ block: "center" });
  recordings[side].spans[recordings[side].origin.findIndex((origin) => origin?.[0] === number)]?.scrollIntoView({ block: "nearest" });
  tell();
}

byId("search").addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === byId("search")) {
    if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { byId("search").value = ""; search(); byId("search").blur(); }
    return;
  }
  const slot = document.activeElement?.closest(".slot");
  const side = slot ? +slot.dataset.side : 0, [number, k] = recordings[side].current;
  const moves = {
    "/": () => byId("search").focus(), Escape: () => { slot?.blur(); hide(); },
    j: () => select(side, slot ? number + 1 : number, k), k: () => select(side, slot ? number - 1 : number, k),
    ...(slot && {
      ArrowDown: () => select(side, number + 1, k), ArrowUp: () => select(side, number - 1, k),
      ArrowRight: () => select(side, number, k + 1), ArrowLeft: () => select(side, number, k - 1),
      Home: () => select(side, 0, k), End: () => select(side, recordings[side].rounds.length - 1, k),
    }),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  moves[event.key]();
});

document.body.classList.toggle("two", stretches !== null);
byId("panels").append(...recordings.map(panel));
if (stretches) byId("rounds").append(element("div", { class: "names" }, ...recordings.map(({ label }) => element("span", {}, label))));
byId("rounds").append(...shells);
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    fill(+entry.target.dataset.row);
    near.unobserve(entry.target);
  }
}, { rootMargin: "800px" });
for (const shell of shells) near.observe(shell);
document.documentElement.dataset.ready = Math.round(performance.now());
