// The page of the server: conversations, which are kept in the browser, and figures from /metrics once a second.

import { copyButton, render } from "./markdown.js";
import { Conversations } from "./conversations.js";

// The settings that are fields of a request.
const SAMPLING = ["temperature", "top_p", "min_p", "top_k", "seed", "max_tokens"];

const element = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const conversations = new Conversations();
let shown = conversations.latest() ?? conversations.create();
let model;
let running = null; // the answer that is coming in: its conversation, and what breaks it off

// Asks the server, with the key if there is one. Asks for a key where it is wanted, until it is right.
async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    // Another request may have asked for a key while this one was on its way.
    if (sessionStorage.getItem("key") === key) await askForKey(key !== null);
  }
}

let keyAsked = null;
function askForKey(wrong) {
  const dialog = element("key-dialog");
  keyAsked ??= new Promise((resolve) => {
    element("key-wrong").hidden = !wrong;
    element("key").value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("key", element("key").value);
      keyAsked = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return keyAsked;
}

// Keeps the end in view, unless the reader has scrolled up.
function followed(change) {
  const messages = element("messages");
  const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 40;
  change();
  if (atEnd) messages.scrollTop = messages.scrollHeight;
}

const action = (text, run) => {
  const button = make("button", { type: "button", textContent: text });
  button.addEventListener("click", run);
  return button;
};

// A message as nodes of the page.
function asNodes(message, index) {
  const mine = message.role === "user";
  const node = make("article", { className: `message ${message.role}` });
  node.setAttribute("aria-label", mine ? "You" : "Assistant");
  if (message.reasoning) {
    const reasoning = make("details", { className: "reasoning" }, make("summary", { textContent: "Reasoning" }));
    reasoning.append(make("div", { textContent: message.reasoning }));
    node.append(reasoning);
  }
  const content = make("div", { className: "content" });
  content.append(mine ? message.content : render(message.content));
  node.append(content);
  if (message.open) {
    node.setAttribute("aria-busy", "true");
    return node;
  }
  const below = make("div", { className: "below" });
  if (message.figures) below.append(make("span", { className: "figures", textContent: message.figures }));
  below.append(copyButton(message.content));
  if (mine) below.append(action("Edit", () => edit(index)));
  else if (index === shown.messages.length - 1) below.append(action("Regenerate", () => regenerate()));
  node.append(below);
  return node;
}

function showAll() {
  const nodes = shown.messages.map(asNodes);
  if (shown.error) nodes.push(errorNode(shown.error));
  element("messages").replaceChildren(...nodes);
  element("messages").scrollTop = element("messages").scrollHeight;
  document.body.dataset.answers = String(answers());
  showList();
  showState();
}

const answers = () => shown.messages.filter((message) => message.role === "assistant" && !message.open).length;

function errorNode(text) {
  const node = make("div", { className: "message error", textContent: text });
  node.setAttribute("role", "alert");
  return node;
}

function showList() {
  const rows = conversations.all().map((conversation) => {
    const open = make("button", { type: "button", className: "title", textContent: conversation.title || "New conversation" });
    open.title = open.textContent;
    open.addEventListener("click", () => {
      shown = conversation;
      showMenu(false);
      showAll();
    });
    const forget = make("button", { type: "button", textContent: "×", title: "Delete" });
    forget.setAttribute("aria-label", `Delete ${open.textContent}`);
    forget.addEventListener("click", () => {
      if (running?.conversation === conversation) running.abort.abort();
      conversations.remove(conversation);
      if (shown === conversation) shown = conversations.latest() ?? conversations.create();
      showAll();
    });
    const row = make("div", {}, open, forget);
    if (conversation === shown) row.setAttribute("aria-current", "true");
    return row;
  });
  element("conversations").replaceChildren(...rows);
}

const showState = () => {
  element("send").textContent = running?.conversation === shown ? "Stop" : "Send";
};

// The data of server-sent events, as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (buffer + value).split("\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

function requestBody(conversation) {
  const settings = conversations.settings();
  const messages = conversation.messages.filter((message) => !message.open);
  const said = messages.map(({ role, content }) => ({ role, content }));
  if (settings.system) said.unshift({ role: "system", content: settings.system });
  const body = { model, messages: said, stream: true, stream_options: { include_usage: true } };
  for (const name of SAMPLING) {
    if (settings[name] !== undefined) body[name] = settings[name];
  }
  return body;
}

// Answers the last message of a conversation. The answer belongs to that conversation, whichever is shown meanwhile.
async function answer(conversation) {
  const abort = new AbortController();
  const body = JSON.stringify(requestBody(conversation));
  const message = { role: "assistant", content: "", reasoning: "", open: true };
  conversation.messages.push(message);
  conversation.error = null;
  running = { conversation, abort };
  showAll();
  let drawn = false;
  const draw = () => {
    if (drawn || conversation !== shown) return;
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      const place = element("messages").lastElementChild;
      if (conversation !== shown || !message.open || !place) return;
      followed(() => place.replaceWith(asNodes(message)));
    });
  };
  const sent = performance.now();
  let first = null;
  let tokens = 0;
  let failed = null;
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body,
      signal: abort.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta;
      if (delta?.content || delta?.reasoning_content) first ??= performance.now();
      message.content += delta?.content ?? "";
      message.reasoning += delta?.reasoning_content ?? "";
      tokens = event.usage?.completion_tokens ?? tokens;
      draw();
    }
  } catch (error) {
    if (error.name !== "AbortError") failed = error.message;
  }
  delete message.open;
  if (tokens > 1 && first !== null) {
    // What comes in one piece says nothing of the time between its tokens: the whole request is what can be measured.
    const end = performance.now();
    const rate = 1000 * (end - first > 50 ? (tokens - 1) / (end - first) : tokens / (end - sent));
    message.figures = `${tokens} tokens, ${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`;
  }
  if (failed !== null) {
    conversation.error = failed;
    if (!message.content) {
      // What the server refused is not sent again with every later message: it goes back to where it was written.
      conversation.messages.pop();
      const refused = conversation.messages.pop();
      if (conversation === shown && !element("text").value) element("text").value = refused?.content ?? "";
      grow();
    }
  }
  if (running?.abort === abort) running = null;
  conversations.keep(conversation);
  if (conversation === shown) followed(showEnd);
  else showList();
}

// Shows the conversation as it is after an answer, without moving what the reader looks at.
function showEnd() {
  const messages = element("messages");
  const top = messages.scrollTop;
  showAll();
  messages.scrollTop = top;
}

function say(text) {
  // One answer at a time, and the one that is coming in is kept as far as it has come.
  running?.abort.abort();
  shown.title ||= text.slice(0, 60);
  shown.messages.push({ role: "user", content: text });
  conversations.keep(shown);
  answer(shown);
}

function regenerate() {
  if (running) return;
  shown.messages.pop();
  answer(shown);
}

// Takes a message back, with all that came after it, to write it anew.
function edit(index) {
  if (running?.conversation === shown) running.abort.abort();
  element("text").value = shown.messages[index].content;
  shown.messages.length = index;
  shown.error = null;
  conversations.keep(shown);
  showAll();
  grow();
  element("text").focus();
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running?.conversation === shown) return running.abort.abort();
  const text = element("text").value.trim();
  if (!text) return;
  element("text").value = "";
  grow();
  say(text);
});

// The field is as high as its text, up to what the style allows.
function grow() {
  const text = element("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}
element("text").addEventListener("input", grow);
element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});

element("clear").addEventListener("click", () => {
  running?.abort.abort();
  shown = conversations.create();
  showMenu(false);
  showAll();
  element("text").focus();
});

// On a narrow screen the list of conversations is a menu.
function showMenu(open) {
  element("conversations").classList.toggle("open", open);
  element("menu").setAttribute("aria-expanded", String(open));
}
element("menu").addEventListener("click", () => showMenu(!element("conversations").classList.contains("open")));
element("chat").addEventListener("click", () => showMenu(false));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") showMenu(false);
});

element("settings").addEventListener("click", () => {
  const settings = conversations.settings();
  for (const name of ["system", ...SAMPLING]) element(name).value = settings[name] ?? "";
  element("settings-dialog").showModal();
});
element("settings-dialog").addEventListener("close", () => {
  const settings = { system: element("system").value.trim() || undefined };
  for (const name of SAMPLING) {
    const value = element(name).valueAsNumber;
    if (Number.isFinite(value)) settings[name] = value;
  }
  conversations.keepSettings(settings);
});

let before = null;
async function figures() {
  const text = await (await ask("metrics")).text();
  const number = (name) => Number(text.match(new RegExp(`^${name} (.*)$`, "m"))?.[1] ?? NaN);
  const now = { time: performance.now(), tokens: number("dsrun_generated_tokens_total") };
  if (before) {
    const rate = (now.tokens - before.tokens) / ((now.time - before.time) / 1000);
    element("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
  }
  before = now;
  element("running").textContent = number("dsrun_requests_running");
  element("waiting").textContent = number("dsrun_requests_waiting");
  element("blocks").textContent = `${number("dsrun_kv_blocks_in_use")} / ${number("dsrun_kv_blocks")}`;
}

async function start() {
  try {
    model ??= (await (await ask("v1/models")).json()).data?.[0].id;
    element("model").textContent = model ?? "loading";
    await figures();
  } catch (error) {
    // The server may be starting or gone: what is shown stays, and the next round asks again.
    console.debug(error);
  }
  setTimeout(start, 1000);
}
showAll();
start();
