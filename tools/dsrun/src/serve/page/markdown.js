// Turns the Markdown of a model into nodes of the page. A model's text is not trusted: no scripts, no styles, nothing that loads.

import { marked } from "./marked.js";

const ALLOWED = {
  FORBID_TAGS: ["img", "style", "form", "input", "button", "svg", "math", "video", "audio", "iframe"],
  FORBID_ATTR: ["style", "class", "id", "name"],
  RETURN_DOM_FRAGMENT: true,
};

// HTML in an answer is about HTML more often than it is meant as such: it is shown as it is written.
const escape = (text) => text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);
const renderer = {
  html: ({ text }) => escape(text),
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
};
marked.use({ gfm: true, breaks: true, renderer });

export function render(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const item of fragment.querySelectorAll("li")) {
    // Its box is its mark.
    if (/^[☑☐] /.test(item.textContent)) item.className = "task";
  }
  for (const block of fragment.querySelectorAll("pre")) {
    const copy = copyButton(block.textContent);
    copy.className = "copy";
    // Beside the block and not in it, so that it stays where it is when the code is scrolled.
    const frame = document.createElement("div");
    frame.className = "code";
    block.replaceWith(frame);
    frame.append(block, copy);
  }
  return fragment;
}

// A button that copies a text, and says whether it did.
export function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(text)) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// Copies a text, also on pages without TLS, where browsers have no clipboard. Returns whether it was copied.
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
