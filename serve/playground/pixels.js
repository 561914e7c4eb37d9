// The playground's pixel worlds: the simulator and the world model of a game, played by the same keys.

import { $, ServiceError, el, events } from "./api.js";
import { encodeGif } from "./gif.js";

const FPS = 15;
const TURN = 300; // actions that the agent is asked for at a time
const SIDES = { real: "Simulator", imagined: "Imagined" };
const OUTLINE = "rgb(255, 48, 96)";
const BACKGROUND = "rgb(48, 48, 64)";
const WIDTH = 320; // of a side on the screen, in pixels
const GIF_WIDTH = 160;
const GAP = 8;
const MOST_RECORDED = 600; // frames
const ARROWS = { ArrowLeft: "L", ArrowRight: "R", ArrowUp: "U", ArrowDown: "D" };
const NAMES = { L: "←", R: "→", U: "↑", D: "↓", "-": "wait" };
const COMMANDS = "BFN.";

const MOST_KEYS = 1000; // of a request
const SHOWN = ["#pixels", "#screen"]; // the hashes of this tab
const games = kept(() => JSON.parse(sessionStorage.games)) ?? {}; // the id of each world's game, which a reload keeps
let frame = null;
let queue = "";
let sending = null; // what stops the request that is under way
let agent = false;
let held = null; // the key of an action that is down
let tapped = null; // one that was pressed since the last tick
let recorded = null;

const model = () => $("game").value;

// What a use of the storage returns; null where a browser forbids it or nothing is stored.
function kept(use) {
  try {
    return use();
  } catch {
    return null;
  }
}

// ---- playing

async function send(keys, fps) {
  sending = new AbortController();
  const { signal } = sending;
  $("pixel-error").textContent = "";
  try {
    const body = { model: model(), id: games[model()] ?? null, keys, fps };
    if (body.id === null) body.seed = Math.floor(Math.random() * 2 ** 31);
    for await (const next of events("v1/games", body, signal)) {
      if (signal.aborted) return;
      games[next.model] = next.id;
      kept(() => { sessionStorage.games = JSON.stringify(games); });
      show(next);
    }
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof ServiceError)) throw error;
    if (error.status === 404) delete games[model()]; // it has expired: the next key begins another one
    setAgent(false);
    queue = "";
    $("pixel-error").textContent = error.message;
  } finally {
    if (sending?.signal === signal) sending = null;
  }
}

// Sends what was pressed meanwhile in one request, then lets the agent play if it has the keyboard.
async function pump() {
  while (!sending && (queue || agent)) {
    const keys = queue.slice(0, MOST_KEYS);
    queue = queue.slice(MOST_KEYS);
    await (keys ? send(keys, 60) : send("A".repeat(TURN), FPS));
  }
}

function press(key) {
  if (agent) setAgent(false);
  queue += key;
  pump();
}

function setAgent(on) {
  agent = on;
  $("agent").textContent = on ? "Take over" : "Hand to the agent";
  $("agent").setAttribute("aria-pressed", String(on));
  if (on) $("real-time").checked = false;
  if (!on) sending?.abort();
  if (!on) sending = null;
}

async function begin() {
  setAgent(false);
  queue = "";
  await look();
  $("screen").focus();
}

// Shows the game as it is, then plays what was pressed meanwhile.
async function look() {
  await send("", 60);
  await pump();
}

// In real time an action is taken at each tick: that of the key that is down, else none.
function tick() {
  if (!$("real-time").checked || $("pixels").hidden || !frame || agent || sending) return;
  press(held ?? tapped ?? frame.actions[Math.max(frame.arrows.indexOf("-"), frame.arrows.indexOf("D"), 0)]);
  tapped = null;
}

function keyOf(event) {
  if (!frame || event.ctrlKey || event.metaKey || event.altKey) return null;
  if (event.key in ARROWS) return frame.actions[frame.arrows.indexOf(ARROWS[event.key])] ?? null;
  return event.key.length === 1 && frame.actions.includes(event.key) ? event.key : null;
}

function onKey(event) {
  const action = keyOf(event);
  const command = event.key.length === 1 ? event.key.toUpperCase() : "";
  if (action !== null) {
    held = tapped = action;
    if (!$("real-time").checked || agent) press(action);
  } else if (command === "A" && frame) {
    toggleAgent();
  } else if (frame && command && COMMANDS.includes(command)) {
    press(command);
  } else {
    return;
  }
  event.preventDefault();
}

function toggleAgent() {
  setAgent(!agent);
  if (agent) pump();
  else look();
}

// ---- what is seen

function show(next) {
  if (frame?.id !== next.id) showActions(next);
  frame = next;
  const pictures = Object.entries(next.sides).map(([name, side]) => [name, side, picture(next, side)]);
  for (const [name, side, small] of pictures) {
    drawn($(`${name}-canvas`), next, small, WIDTH);
    $(`${name}-score`).textContent = `${SIDES[name]}: ${(Math.round(100 * side.score) / 100 + 0).toFixed(2)}${side.over ? ", over" : ""}`;
  }
  $("divergence").textContent = `Cells that differ: ${next.cells.length}. Diverged in ${next.diverged} of ${next.steps} steps.`;
  $("progress").textContent = `Episode ${next.episode}, step ${next.step}`;
  if (recorded) record(next, pictures.map(([, , small]) => small));
}

function showActions(next) {
  const buttons = [...next.actions].map((key, i) => {
    const button = el("button", { type: "button" }, NAMES[next.arrows[i]] ?? key);
    button.title = `Action ${key}`;
    button.addEventListener("click", () => press(key));
    return button;
  });
  $("moves").replaceChildren(...buttons);
}

// A side's pixels, one each.
function picture({ width, height }, { rgb }) {
  const bytes = Uint8Array.from(atob(rgb), (letter) => letter.charCodeAt(0));
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i += 1) image.data.set([...bytes.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  const canvas = el("canvas", { width, height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Draws a side this wide, with the cells that differ outlined.
function drawn(canvas, { width, height, cell_size: cell, cells }, small, most, left = 0) {
  const scale = Math.max(1, Math.floor(most / Math.max(width, height)));
  if (!left) Object.assign(canvas, { width: canvas.double ? 2 * scale * width + GAP : scale * width, height: scale * height });
  const context = canvas.getContext("2d");
  if (!left) {
    context.fillStyle = BACKGROUND;
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  context.imageSmoothingEnabled = false;
  context.drawImage(small, left, 0, scale * width, scale * height);
  context.strokeStyle = OUTLINE;
  const line = Math.max(1, Math.floor((scale * cell) / 12));
  context.lineWidth = line;
  for (const [y, x] of cells) {
    const [across, down] = [Math.min(cell, width - x * cell), Math.min(cell, height - y * cell)];
    context.strokeRect(left + x * cell * scale + line / 2, y * cell * scale + line / 2, across * scale - line, down * scale - line);
  }
  return scale;
}

// ---- recording

function record(next, smalls) {
  const canvas = el("canvas");
  canvas.double = smalls.length > 1;
  const scale = drawn(canvas, next, smalls[0], GIF_WIDTH);
  if (smalls[1]) drawn(canvas, next, smalls[1], GIF_WIDTH, scale * next.width + GAP);
  const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  if (recorded.length && recorded[0].width !== image.width) recorded = []; // another world
  recorded.push(image);
  if (recorded.length >= MOST_RECORDED) finishRecording();
  else $("record").textContent = `Save the GIF (${recorded.length} frames)`;
}

function finishRecording() {
  const frames = recorded;
  recorded = null;
  $("record").textContent = "Record a GIF";
  if (!frames.length) return;
  const gif = encodeGif(frames, 1000 / FPS);
  let text = "";
  for (const byte of gif) text += String.fromCharCode(byte);
  const source = `data:image/gif;base64,${btoa(text)}`;
  const link = el("a", { href: source, download: `${model()}.gif` }, `${model()}.gif`);
  $("gif").replaceChildren(el("img", { src: source, alt: "Recorded game: the simulator left, imagined right" }),
    el("p", { className: "meta" }, link, ` · ${frames.length} frames, ${Math.ceil(gif.length / 1024)} KB`));
}

// ---- the tab

export function openTab() {
  const pixels = SHOWN.includes(location.hash);
  document.querySelector(".skip").href = pixels ? "#screen" : "#worlds";
  $("pixels").hidden = !pixels;
  $("text").hidden = pixels;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (pixels ? "#pixels" : "#text")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!pixels && agent) setAgent(false);
}

$("pixel-start").addEventListener("submit", (event) => { event.preventDefault(); begin(); });
$("game").addEventListener("change", begin);
$("screen").addEventListener("keydown", onKey);
$("screen").addEventListener("keyup", (event) => { if (keyOf(event) === held) held = null; });
$("screen").addEventListener("blur", () => { held = null; });
$("agent").addEventListener("click", () => { if (frame) toggleAgent(); });
for (const key of COMMANDS) $(`key-${key}`).addEventListener("click", () => { if (frame) press(key); });
$("record").addEventListener("click", () => {
  if (recorded) return finishRecording();
  recorded = [];
  $("record").textContent = "Save the GIF (0 frames)";
});
setInterval(tick, 1000 / FPS);
addEventListener("hashchange", openTab);
