// Calls of the service, and the elements of a page.

export const $ = (id) => document.getElementById(id);

export class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function el(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

export async function ask(method, path, body, signal) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (/[^ -~]/.test($("key").value)) throw new ServiceError("The API key has a character that no key has.", 401);
  if ($("key").value) headers["Authorization"] = `Bearer ${$("key").value}`;
  let response;
  try {
    // An address with a user's name and password is no base of a request.
    const address = new URL(path, location.origin + location.pathname);
    response = await fetch(address, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ServiceError("The service does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const reply = await response.json().catch(() => ({}));
  throw new ServiceError(`${reply.error?.message ?? "The service failed"} (status ${response.status})`, response.status);
}

export async function call(method, path, body, signal) {
  return (await ask(method, path, body, signal)).json();
}

// The objects of an answer in server-sent events, as they come.
export async function* events(path, body, signal) {
  const reader = (await ask("POST", path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
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
