// The playground. Whatever comes from the model, the service or the user becomes text nodes, never markup.

const $ = (id) => document.getElementById(id);
const form = $("start");
const panes = [];
let model = null;
let examples = [];
let born = 0;
const wide = matchMedia("(min-width: 60rem)"); // side by side, whole branches line up

class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

async function ask(method, path, body) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if ($("key").value) headers["Authorization"] = `Bearer ${$("key").value}`;
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ServiceError("The service does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const reply = await response.json().catch(() => ({}));
  throw new ServiceError(`${reply.error?.message ?? "The service failed"} (status ${response.status})`, response.status);
}

async function call(method, path, body) {
  return (await ask(method, path, body)).json();
}

// The objects of an answer in server-sent events, as they come.
async function* events(path, body) {
  const reader = (await ask("POST", path, { ...body, stream: true })).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    if (done) throw new ServiceError("The service broke off its answer.");
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new ServiceError(told.error.message);
      yield told;
    }
  }
}

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

function sameOrigin(a, b) {
  return a.origin === b.origin;
}

function addPane(world, origin, steps, title) {
  const pane = { world, origin, steps, title, number: born, shared: steps.length, unfolded: wide.matches };
  const number = pane.number;
  pane.log = el("ol", { className: "log" });
  pane.log.setAttribute("role", "log");
  pane.log.setAttribute("aria-label", `Steps of ${title}`);
  pane.error = el("p", { className: "error" });
  pane.error.setAttribute("role", "alert");
  pane.chips = el("div", { className: "chips" });
  pane.chips.setAttribute("aria-label", "Actions to click");
  pane.chips.setAttribute("role", "group");
  pane.input = el("input", { id: `action-${number}`, spellcheck: false, autocapitalize: "none", enterKeyHint: "go" });
  pane.each = el("input", { type: "checkbox", checked: true });
  const act = el("form", { autocomplete: "off" },
    el("label", { htmlFor: pane.input.id }, "Action ", el("small", {}, "(several: separate them with ;)")),
    el("div", { className: "row" }, pane.input, el("button", { className: "main" }, "Imagine")),
    el("label", { className: "check" }, pane.each, "write out every observation, not the last alone"),
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
  pane.node = el("section", { className: "card world" },
    el("div", { className: "head" }, el("h2", {}, title), branch, close), start(origin), pane.warning, pane.note, foldNode(pane),
    pane.log, pane.unrecorded, pane.error, act);
  pane.node.setAttribute("aria-label", title);
  panes.push(pane);
  $("empty").hidden = true;
  $("worlds").append(pane.node);
  render(pane);
  pane.input.focus();
  return pane;
}

function start(origin) {
  const seen = origin.history.flatMap((step) => [line("action", step.action), line("seen", step.observation)]);
  return el("details", {}, el("summary", {}, "Goal and what was seen"),
    el("p", {}, origin.goal), line("seen", origin.observation), ...seen);
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
  pane.log.append(...live.map((step) => step.node));
  await guarded(pane, async () => {
    const decode = pane.each.checked ? "each" : "last";
    for await (const told of events(`v1/worlds/${pane.world.id}/step`, { actions, decode, logprobs: true })) {
      if (told.object === "world.step") {
        pane.world = told.world;
        pane.steps.push(...told.steps);
        pane.input.value = "";
      } else {
        grow(live[told.index], told.delta);
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
  addPane(world, pane.origin, pane.steps.map((step) => ({ ...step })), title).node.scrollIntoView({ block: "nearest" });
}

async function closePane(pane) {
  panes.splice(panes.indexOf(pane), 1);
  pane.node.remove();
  $("empty").hidden = panes.length > 0;
  panes.forEach(render);
  $("worlds").focus();
  await call("DELETE", `v1/worlds/${pane.world.id}`).catch(() => {}); // gone already, or it will expire
}

// ---- what a pane shows

function render(pane) {
  const open = new Set([...pane.log.querySelectorAll("details[open]")].map((node) => node.dataset.step));
  pane.log.replaceChildren(...pane.steps.map((step, i) => stepNode(pane, step, i, open.has(String(i)))));
  pane.note.hidden = pane.steps.every((step) => step.reward !== null);
  pane.unrecorded.hidden = onRecord(pane, pane.steps.length);
  const recorded = pane.origin.example?.actions ?? [];
  const next = onRecord(pane, pane.steps.length) ? recorded[pane.steps.length] : undefined;
  const known = new Set([...recorded, ...panes.filter((other) => sameOrigin(other, pane))
    .flatMap((other) => other.steps.map((step) => step.action))]);
  pane.chips.replaceChildren(...[...known].map((action) => {
    const chip = el("button", { type: "button", className: action === next ? "next" : "" }, action);
    chip.addEventListener("click", () => take(pane, action));
    return chip;
  }));
  for (const other of panes) if (other !== pane && sameOrigin(other, pane)) compare(other);
  compare(pane);
}

// Whether the first `count` actions are those that were recorded.
function onRecord(pane, count) {
  const recorded = pane.origin.example?.actions ?? [];
  return count <= recorded.length && pane.steps.slice(0, count).every((step, i) => step.action === recorded[i]);
}

function stepNode(pane, step, index, open) {
  const item = el("li", { hidden: index < pane.shared && !pane.unfolded }, line("action", step.action));
  if (step.observation === null) item.append(line("meta", "not written out"));
  else item.append(observationNode(step));
  item.append(line("meta", facts(step)), el("div", { className: "difference" }));
  if (onRecord(pane, index + 1)) item.append(truthNode(pane, step, index, open));
  return item;
}

function observationNode(step) {
  return el("div", { className: "seen" }, ...step.tokens.map(tokenNode));
}

function tokenNode({ token, logprob, loops }) {
  const node = el("span", { title: `${percent(Math.exp(logprob))}, ${loops} loops` }, token);
  node.style.setProperty("--doubtful", String(Math.round(75 * (1 - Math.exp(logprob)))));
  return node;
}

const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)} %`;

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

// ---- starting

function choose() {
  const example = examples[$("example").value];
  const history = $("history");
  history.hidden = !example?.history.length;
  if (!example) return;
  $("goal").value = example.goal;
  $("observation").value = example.observation;
  history.querySelector("summary").textContent = `Then ${example.history.length} step(s) were seen`;
  history.querySelector("div").replaceChildren(
    ...example.history.flatMap((step) => [line("action", step.action), line("seen", step.observation)]));
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
    alert.textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

form.addEventListener("submit", begin);
$("example").addEventListener("change", choose);
$("key").addEventListener("change", connect);
examples = await call("GET", "playground/examples.json").catch(() => []);
examples.forEach((example, i) => $("example").append(el("option", { value: i }, `${example.env}: ${example.name}`)));
if (examples.length) {
  $("example").value = "0";
  choose();
}
await connect();
