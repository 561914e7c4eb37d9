// /openapi.json as a page. Whatever it says becomes text nodes, never markup.

const main = document.querySelector("main");

function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

// What joins, with a text between each two.
const joined = (parts, between) => parts.flatMap((part, i) => (i ? [between, ...part] : part));

// A type as text nodes and links to objects.
function typeNodes(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return [el("a", { href: `#${name}` }, name)];
  }
  const ways = schema.anyOf ?? schema.oneOf;
  if (ways) return joined(ways.map(typeNodes), " or ");
  const fixed = schema.enum ?? ("const" in schema ? [schema.const] : null);
  if (fixed) return [fixed.map((value) => JSON.stringify(value)).join(" or ")];
  const told = schema.type === "array" ? ["list of ", ...typeNodes(schema.items ?? {})] : [schema.type ?? "anything"];
  return [...told, limits(schema)];
}

const LIMITS = [
  ["minimum", "at least"], ["exclusiveMinimum", "over"], ["maximum", "at most"], ["exclusiveMaximum", "under"],
  ["minLength", "characters at least"], ["maxLength", "characters at most"], ["minItems", "items at least"],
  ["maxItems", "items at most"], ["default", "by default"],
];

function limits(schema) {
  const told = LIMITS.filter(([key]) => key in schema).map(([key, words]) => `${words} ${schema[key]}`);
  return told.length ? ` (${told.join(", ")})` : "";
}

function fieldTable(fields) {
  const rows = fields.map(({ name, required, schema, description }) => el("tr", {},
    el("th", { scope: "row" }, name, ...(required ? [el("small", {}, " required")] : [])),
    el("td", {}, ...typeNodes(schema), ...(description ? [el("div", { className: "meta" }, description)] : []))));
  return el("table", {}, el("tbody", {}, ...rows));
}

function fieldsOf(schema) {
  return Object.entries(schema.properties ?? {}).map(([name, found]) => (
    { name, required: schema.required?.includes(name), schema: found, description: found.description }));
}

function operationNode(path, method, told) {
  const card = el("section", { className: "card" }, el("h2", {}, `${method.toUpperCase()} ${path}`));
  if (told.description) card.append(el("p", {}, told.description));
  const parameters = (told.parameters ?? []).map((one) => ({ ...one, description: `in the ${one.in}` }));
  if (parameters.length) card.append(fieldTable(parameters));
  const body = told.requestBody?.content["application/json"].schema;
  if (body) card.append(el("p", {}, "Body: ", ...typeNodes(body)));
  return card;
}

function objectNode(name, schema) {
  const card = el("section", { className: "card", id: name }, el("h2", {}, name));
  if (schema.description) card.append(el("p", {}, schema.description));
  card.append(fieldTable(fieldsOf(schema)));
  return card;
}

const response = await fetch("openapi.json").catch(() => null);
if (response?.ok) {
  const told = await response.json();
  for (const [path, methods] of Object.entries(told.paths)) {
    for (const [method, operation] of Object.entries(methods)) main.append(operationNode(path, method, operation));
  }
  for (const [name, schema] of Object.entries(told.components.schemas)) main.append(objectNode(name, schema));
  document.getElementById("status").replaceChildren(
    `Version ${told.info.version}; the same for machines: `, el("a", { href: "openapi.json" }, "openapi.json"));
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
} else {
  document.getElementById("status").textContent = "The service does not answer. Is it still running?";
}
