// The playground's text worlds. Whatever comes from the model, the service or the user becomes text nodes, never markup.

import { $, ServiceError, call, el, events } from "./api.js";
import { openTab } from "./pixels.js";

const form = $("start");
const panes = [];
let model = null;
let examples = [];
let born = 0;
const wide = matchMedia("(min-width: 40rem)"); // branches stand side by side and scroll on their own
const TRUST = "The model's probability that the environment says exactly this";
const ENVIRONMENTS = { scienceworld: "ScienceWorld", alfworld: "ALFWorld" };
const SIDES = ["left", "right"];
const MOST_SUGGESTIONS = 10;
const IMPLIED = [ // what an action or an observation names, and the action that follows from it
  [/^open door to (.+)/gm, "go to "], [/door to the (.+) \(that is open\)/g, "go to "],
  [/door to the (.+) \(that is closed\)/g, "open door to "], [/^You move to /gm, "look around"],
];

async function connect() {
  try {
    model = (await call("GET", "v1/models")).data[0].id;
    $("status").textContent = `Model: ${model}`;
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    model = null;
    $("status").textContent = error.message;
    if (error.status !== 401) return;
    $("key").closest("details").open = true;
    $("key").focus();
  }
}

// ---- panes: one for each world

const sameOrigin = (a, b) => a.origin === b.origin;

function addPane(world, origin, steps, title) {
  const pane = { world, origin, steps, title, number: born, shared: steps.length, unfolded: wide.matches };
  const number = pane.number;
  pane.log = el("ol", { className: "log" });
  const log = el("div", {}, pane.log); // as a log, the list itself would be none
  log.setAttribute("role", "log");
  log.setAttribute("aria-label", `Steps of ${title}`);
  pane.error = el("p", { className: "error" });
  pane.error.setAttribute("role", "alert");
  pane.chips = el("div", { className: "chips" });
  pane.chips.setAttribute("aria-label", "Suggested actions");
  pane.chips.setAttribute("role", "group");
  pane.input = el("input", { id: `action-${number}`, spellcheck: false, autocapitalize: "none", enterKeyHint: "go" });
  pane.each = el("input", { type: "checkbox", checked: true });
  const act = el("form", { autocomplete: "off" },
    el("div", { className: "row" },
      el("label", { htmlFor: pane.input.id }, "Action ", el("small", {}, "(several: separate them with ;)")),
      el("label", { className: "check" }, pane.each, "show every intermediate observation")),
    el("div", { className: "row" }, pane.input, el("button", { className: "main" }, "Imagine")),
    pane.chips);
  act.addEventListener("submit", (event) => { event.preventDefault(); take(pane, pane.input.value); });
  pane.input.addEventListener("keydown", (event) => recall(pane, event));
  const branch = el("button", { type: "button" }, "Branch");
  branch.addEventListener("click", () => guarded(pane, () => fork(pane)));
  const close = el("button", { type: "button", ariaLabel: `Close ${title}` }, "Close");
  close.addEventListener("click", () => closePane(pane));
  pane.warning = el("p", { className: "error", hidden: !world.warnings.length }, `Warning: ${world.warnings.join("; ")}`);
  pane.warning.setAttribute("role", "alert");
  pane.note = el("p", { className: "meta", hidden: true }, "This checkpoint predicts neither reward nor the end.");
  pane.unrecorded = el("p", { className: "meta", hidden: true },
    "No simulator runs here, and nothing is recorded for these actions: there is only what the model imagines.");
  pane.scroll = el("div", { className: "scroll", tabIndex: 0, ariaLabel: `What was seen in ${title}` },
    ...seenNodes(origin), foldNode(pane), log, pane.note, pane.unrecorded);
  pane.scroll.setAttribute("role", "group");
  const name = title.includes(" of ") ? [] : [" ", el("small", {}, taskName(origin.goal))]; // branches have long titles
  pane.node = el("section", { className: "card world" },
    el("div", { className: "head" }, el("h2", {}, title, ...name), branch, close),
    pane.warning, pane.scroll, pane.error, act);
  pane.node.setAttribute("aria-label", title);
  panes.push(pane);
  showIntroduction(false);
  $("worlds").append(pane.node);
  render(pane);
  pane.input.focus();
  return pane;
}

// The observations of an origin: the last one in view, the earlier ones with the goal on request.
function seenNodes(origin) {
  const seen = [line("seen", origin.observation)];
  for (const step of origin.history) seen.push(line("action", step.action), line("seen", step.observation));
  const last = seen.pop();
  last.classList.add("last");
  return [el("details", {}, el("summary", {}, "Goal and what was seen"), el("p", {}, origin.goal), ...seen), last];
}

// The task in a goal, such as "Melt tin"; of other goals the first sentence.
function taskName(goal) {
  const task = goal.match(/task is to:? ([^.,]+)/i)?.[1].replace("a(n)", "a") ?? goal.split(/[.\n]/, 1)[0];
  return task.charAt(0).toUpperCase() + task.slice(1);
}

// A button that shows the steps before a branch, which are those of the world it came from.
function foldNode(pane) {
  const button = el("button", { type: "button", hidden: !pane.shared });
  const tell = () => {
    button.textContent = `${pane.unfolded ? "Hide" : "Show"} the ${pane.shared} step(s) before the branch`;
    button.setAttribute("aria-expanded", String(pane.unfolded));
  };
  button.addEventListener("click", () => {
    pane.unfolded = !pane.unfolded;
    tell();
    render(pane);
  });
  tell();
  return button;
}

const line = (className, text) => el("div", { className }, text);

function recall(pane, event) {
  if (event.key !== "ArrowUp" || pane.input.value || !pane.steps.length) return;
  event.preventDefault();
  pane.input.value = pane.steps.at(-1).action;
}

async function guarded(pane, work) {
  const controls = [...pane.node.querySelectorAll("button, input")];
  pane.error.textContent = "";
  pane.node.setAttribute("aria-busy", "true");
  controls.forEach((control) => { control.disabled = true; });
  try {
    await work();
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    pane.error.textContent = error.message;
  } finally {
    controls.forEach((control) => { control.disabled = false; });
    pane.node.removeAttribute("aria-busy");
  }
}

async function take(pane, text) {
  const actions = text.split(";").map((action) => action.trim()).filter(Boolean);
  if (!actions.length) {
    pane.error.textContent = "Type an action first.";
    return;
  }
  const live = actions.map((action) => {
    const waiting = line("meta waiting", "imagining…");
    const seen = line("seen", "");
    return { waiting, seen, node: el("li", {}, line("action", action), seen, waiting) };
  });
  pane.judging?.abort();
  pane.log.append(...live.map((step) => step.node));
  await guarded(pane, async () => {
    const decode = pane.each.checked ? "each" : "last";
    for await (const told of events(`v1/worlds/${pane.world.id}/step`, { actions, decode, logprobs: true, stream: true })) {
      if (told.object === "world.step") {
        pane.world = told.world;
        pane.steps.push(...told.steps);
        if (pane.input.value === text) pane.input.value = "";
      } else {
        grow(live[told.index], told.delta);
        reveal(pane, live[told.index].node);
      }
    }
  });
  live.forEach((step) => step.node.remove());
  render(pane);
  pane.input.focus();
}

// What came of a step joins what is shown of it.
function grow(step, delta) {
  step.seen.append(...(delta.tokens ?? []).map(tokenNode));
  if (delta.finish_reason) step.waiting.remove();
}

async function fork(pane) {
  const [world] = (await call("POST", `v1/worlds/${pane.world.id}/fork`, { count: 1 })).data;
  born += 1;
  const title = `Branch ${born} of ${pane.title.split(" of ")[0]} after step ${pane.steps.length}`;
  const branch = addPane(world, pane.origin, pane.steps.map((step) => ({ ...step })), title);
  SIDES.forEach((side, i) => { $(side).value = [pane, branch][i].number; });
  showComparison();
  branch.node.scrollIntoView({ block: "nearest" });
}

async function closePane(pane) {
  panes.splice(panes.indexOf(pane), 1);
  pane.judging?.abort();
  pane.node.remove();
  showIntroduction(!panes.length);
  panes.forEach(compare);
  showComparison();
  $("worlds").focus();
  await call("DELETE", `v1/worlds/${pane.world.id}`).catch(() => {}); // gone already, or it will expire
}

// ---- what a pane shows

function render(pane) {
  const open = new Set([...pane.log.querySelectorAll("details[open]")].map((node) => node.dataset.step));
  pane.log.replaceChildren(...pane.steps.map((step, i) => stepNode(pane, step, i, open.has(String(i)))));
  pane.note.hidden = pane.steps.every((step) => step.reward !== null);
  pane.unrecorded.hidden = onRecord(pane, pane.steps.length);
  showSuggestions(pane);
  for (const other of panes) if (other !== pane && sameOrigin(other, pane)) compare(other);
  compare(pane);
  showComparison();
  reveal(pane, pane.log.lastElementChild ?? pane.scroll.querySelector(".last"));
}

// Scrolls a pane, not the page, to a step: to its beginning where it is taller than the pane.
function reveal(pane, step) {
  pane.scroll.scrollTop = step.offsetTop - pane.scroll.offsetTop;
}

// Whether the first `count` actions are those that were recorded.
function onRecord(pane, count) {
  const recorded = pane.origin.example?.actions ?? [];
  return count <= recorded.length && pane.steps.slice(0, count).every((step, i) => step.action === recorded[i]);
}

function stepNode(pane, step, index, open) {
  const head = el("div", { className: "head" }, line("action", step.action), ...trustNodes(step));
  const item = el("li", { hidden: index < pane.shared && !pane.unfolded }, head);
  if (step.observation === null) item.append(line("meta", "not written out"));
  else item.append(...observationNodes(step, similarBefore(pane, index)));
  item.append(line("meta", facts(step)), el("div", { className: "difference" }));
  if (onRecord(pane, index + 1)) item.append(truthNode(pane, step, index, open));
  return item;
}

function observationNodes(step, before) {
  if (!before) return [el("div", { className: "seen" }, ...step.tokens.map(tokenNode))];
  const parts = partsOf(step.observation);
  const old = partsOf(before.observation);
  const [removed, added] = differences(old, parts);
  const owners = parts.flatMap((part, i) => Array(part.length).fill(i)); // the part of every character
  let end = 0;
  const tokens = step.tokens.map((token) => {
    end += token.token.length;
    return added.has(owners[end - 1]) ? el("ins", {}, tokenNode(token)) : tokenNode(token);
  });
  const gone = [...removed].flatMap((i) => [" ", el("del", {}, old[i].trim())]);
  const since = `${added.size || gone.length ? "Changed" : "Nothing changed"} since “${before.action}”`;
  const change = el("div", { className: "change meta" }, since, gone.length ? ", gone:" : "", ...gone);
  return [change, el("div", { className: "seen" }, ...tokens)];
}

// The latest earlier observation that shares half of its parts with that of a step, such as an earlier look around.
function similarBefore(pane, index) {
  const parts = partsOf(pane.steps[index].observation);
  const { observation, history } = pane.origin;
  const earlier = [{ action: "the first observation", observation }, ...history, ...pane.steps.slice(0, index)];
  return earlier.findLast((step) => {
    const old = new Set(partsOf(step.observation ?? "").map((part) => part.trim()));
    return parts.length > 1 && parts.filter((part) => old.has(part.trim())).length >= Math.max(old.size, parts.length) / 2;
  });
}

function tokenNode({ token, logprob, loops }) {
  const node = el("span", { title: `${percent(Math.exp(logprob))}, ${loops} loops` }, token);
  node.style.setProperty("--doubtful", String(Math.round(75 * (1 - Math.exp(logprob)))));
  return node;
}

// 99.9 % at most: a probability that rounds to 100 % is not certainty. The space does not break.
const percent = (share) => `${(100 * Math.min(share, 0.999)).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)}\u00a0%`;

function trustNodes({ trust }) {
  if (trust === null) return [];
  return [el("span", { className: `tag trust${trust < 0.5 ? " low" : ""}`, title: TRUST }, `trust ${percent(trust)}`)];
}

function facts(step) {
  const told = [`${step.loops} loops to advance`];
  const tokens = step.tokens ?? [];
  if (tokens.length) {
    const mean = tokens.reduce((sum, { loops }) => sum + loops, 0) / tokens.length;
    told.push(`${Number(mean.toFixed(1))} loops a token`);
  }
  if (step.reward !== null) told.push(`reward ${step.reward.toFixed(1)}`, `goes on: ${percent(step.continuation)}`);
  if (tokens.length) {
    const { token, logprob } = tokens.reduce((least, other) => (other.logprob < least.logprob ? other : least));
    told.push(`least sure of “${token.trim() || "white space"}”: ${percent(Math.exp(logprob))}`);
  }
  if (step.finish_reason === "length") told.push("cut at the most tokens there may be");
  return told.join(" · ");
}

const squeezed = (text) => text.normalize("NFKC").replace(/\s+/g, " ").trim(); // as exact match is counted

function truthNode(pane, step, index, open) {
  const truth = pane.origin.example.observations[index];
  const same = step.observation !== null && squeezed(step.observation) === squeezed(truth);
  const verdict = step.observation === null ? "" : same ? "the same" : "not the same";
  const node = el("details", { open }, el("summary", {}, "What the simulator said"),
    line("seen", truth), el("span", { className: "tag" }, verdict));
  node.dataset.step = index;
  return node;
}

// Marks where a pane differs from the oldest one with the same beginning.
function compare(pane) {
  const first = panes.find((other) => sameOrigin(other, pane));
  if (!first) return;
  pane.steps.forEach((step, i) => {
    const other = first.steps[i];
    const place = pane.log.children[i]?.querySelector(".difference");
    const differs = first !== pane && other && step.observation !== null && other.observation !== null
      && step.observation !== other.observation;
    place?.replaceChildren(...(differs ? [el("span", { className: "tag" }, `differs from ${first.title}`)] : []));
  });
}

// ---- suggested actions

function showSuggestions(pane) {
  const recorded = pane.origin.example?.actions ?? [];
  const next = onRecord(pane, pane.steps.length) ? recorded[pane.steps.length] : undefined;
  const taken = panes.filter((other) => sameOrigin(other, pane)).flatMap((other) => other.steps).map((step) => step.action);
  const actions = [...new Set([...recorded, ...impliedActions(pane), ...taken])].slice(0, MOST_SUGGESTIONS);
  const chips = actions.map((action) => {
    const chip = el("button", { type: "button", className: action === next ? "next" : "" }, el("span", {}, action));
    chip.addEventListener("click", () => take(pane, action));
    return chip;
  });
  pane.chips.replaceChildren(...chips);
  if (actions.length) judge(pane, actions, chips);
}

// Actions that the last step offers: through its doors, and a look at a new place.
function impliedActions(pane) {
  const { action, observation } = pane.steps.at(-1) ?? pane.origin.history.at(-1) ?? { action: "", ...pane.origin };
  const text = `${action}\n${observation ?? ""}`;
  return IMPLIED.flatMap(([pattern, verb]) => [...text.matchAll(pattern)].map((match) => `${verb}${match[1] ?? ""}`));
}

// Adds to each suggestion what the model expects of it. A few tokens decide whether an action is refused.
async function judge(pane, candidates, chips) {
  pane.judging?.abort();
  pane.judging = new AbortController();
  const reply = await call("POST", `v1/worlds/${pane.world.id}/actions`, { candidates, max_tokens: 24 }, pane.judging.signal)
    .catch(() => null); // suggestions work without it
  reply?.data.forEach(({ accepted, trust, observation }, i) => {
    const expected = `${accepted ? "accepted" : "refused"}${trust === null ? "" : `, trust ${percent(trust)}`}`;
    chips[i].append(el("small", {}, expected));
    chips[i].title = observation;
    chips[i].classList.toggle("refused", !accepted);
  });
}

// ---- two branches side by side

// The parts of a text that are compared: lines, and phrases within them. They join to the text.
const partsOf = (text) => text.split(/(?=\n)|(?<=[.,:])(?= \S)/);

// Indices of the parts that only `a` has and of those that only `b` has, by their longest common subsequence.
function differences(a, b) {
  const same = (i, j) => a[i].trim() === b[j].trim();
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      common[i][j] = same(i, j) ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const onlyA = new Set(a.keys());
  const onlyB = new Set(b.keys());
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (same(i, j)) {
      onlyA.delete(i++);
      onlyB.delete(j++);
    } else if (common[i + 1][j] >= common[i][j + 1]) i += 1;
    else j += 1;
  }
  return [onlyA, onlyB];
}

function lastObservation(pane) {
  const { observation, history } = pane.origin;
  return [observation, ...history.map((step) => step.observation), ...pane.steps.map((step) => step.observation)]
    .findLast((text) => text !== null);
}

function showComparison() {
  $("compare").hidden = panes.length < 2;
  if (panes.length < 2) return;
  const chosen = SIDES.map((side) => panes.find((one) => String(one.number) === $(side).value));
  const others = panes.filter((one) => !chosen.includes(one)); // in place of what was closed
  const compared = SIDES.map((side, i) => {
    const pane = chosen[i] ?? others.shift();
    $(side).replaceChildren(...panes.map((one) => el("option", { value: one.number }, one.title)));
    $(side).value = pane.number;
    return partsOf(lastObservation(pane));
  });
  const only = differences(...compared);
  compared.forEach((parts, i) => {
    const nodes = parts.map((part, k) => (only[i].has(k) ? el("mark", {}, part) : part));
    $(`${SIDES[i]}-seen`).replaceChildren(...nodes);
  });
  const verdict = only[0].size + only[1].size ? "differ" : "are the same";
  $("compare").querySelector("summary").textContent = `Compare two branches: their last observations ${verdict}`;
}

// ---- starting

function choose() {
  const example = examples[$("example").value];
  if (example) {
    $("goal").value = example.goal;
    $("observation").value = example.observation;
  }
  preview();
}

function preview() {
  const example = chosen();
  const typed = { goal: $("goal").value, observation: $("observation").value, history: [] };
  $("own").hidden = Boolean(example);
  $("preview").replaceChildren(el("h2", {}, "What the agent sees now"), ...seenNodes(example ?? typed));
}

function showIntroduction(shown) {
  $("empty").hidden = !shown;
  $("preview").hidden = !shown;
}

// The example, as long as its text is unchanged: only then its record is the truth.
function chosen() {
  const example = examples[$("example").value];
  const same = example && $("goal").value === example.goal && $("observation").value === example.observation;
  return same ? example : null;
}

async function begin(event) {
  event.preventDefault();
  const alert = form.querySelector(".error");
  const button = form.querySelector("button.main");
  const example = chosen();
  const origin = {
    goal: $("goal").value, observation: $("observation").value, history: example?.history ?? [], example,
    depth: Number($("depth").value) || undefined,
  };
  alert.textContent = "";
  button.disabled = true;
  try {
    if (model === null) await connect();
    if (model === null) throw new ServiceError($("status").textContent);
    const { goal, observation, history, depth } = origin;
    const world = await call("POST", "v1/worlds", { model, goal, observation, history, depth });
    born += 1;
    addPane(world, origin, [], `World ${born}`).node.scrollIntoView({ block: "nearest" });
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    if (error.status === 404) await connect(); // the service serves another model now
    alert.textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

form.addEventListener("submit", begin);
form.addEventListener("input", preview);
$("example").addEventListener("change", choose);
SIDES.forEach((side) => $(side).addEventListener("change", showComparison));
$("key").addEventListener("change", connect);
$("depth").addEventListener("invalid", () => { $("depth").closest("details").open = true; });
examples = await call("GET", "playground/examples.json").catch(() => []);
examples.forEach((example, i) => {
  const name = `${taskName(example.goal)} (${ENVIRONMENTS[example.env] ?? example.env})`;
  $("example").append(el("option", { value: i }, name));
});
if (examples.length) $("example").value = "0";
choose();
await connect();
openTab();
