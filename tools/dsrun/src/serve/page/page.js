// The page of the server: a conversation, and figures from /metrics once a second.

const element = (id) => document.getElementById(id);
const conversation = [];
let model;
let running = null; // what breaks off the answer that is coming in

// Asks the server, with the key if there is one. Asks for a key, once, where it is wanted.
async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401) return response;
  await askForKey();
  return ask(path, options);
}

let keyAsked = null;
function askForKey() {
  const dialog = element("key-dialog");
  keyAsked ??= new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("key", element("key").value);
      keyAsked = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return keyAsked;
}

function show(role, text) {
  const message = document.createElement("div");
  message.className = `message ${role}`;
  message.textContent = text;
  element("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return message;
}

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

async function answer() {
  const message = show("assistant", "");
  running = new AbortController();
  element("send").textContent = "Stop";
  let text = "";
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model, messages: conversation, stream: true }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      text += event.choices[0]?.delta.content ?? "";
      message.textContent = text;
      message.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  conversation.push({ role: "assistant", content: text });
  running = null;
  element("send").textContent = "Send";
  document.body.dataset.answers = String(conversation.length / 2);
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = element("text").value.trim();
  if (!text) return;
  element("text").value = "";
  conversation.push({ role: "user", content: text });
  show("user", text);
  answer();
});

element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});

element("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  element("messages").replaceChildren();
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
start();
