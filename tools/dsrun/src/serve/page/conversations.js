// Conversations and settings, kept in the browser.

const CONVERSATIONS = "dsrun.conversations";
const SETTINGS = "dsrun.settings";

export class Conversations {
  constructor() {
    // A browser that keeps nothing, or something broken, starts anew.
    this.list = read(CONVERSATIONS, []);
  }

  // All that have messages, the latest first, and those that were just begun.
  all() {
    return [...this.list].reverse();
  }

  latest() {
    return this.list.at(-1);
  }

  create() {
    // An empty one is used before another is begun.
    this.list = this.list.filter((conversation) => conversation.messages.length > 0);
    const conversation = { title: "", messages: [], error: null };
    this.list.push(conversation);
    return conversation;
  }

  // Keeps what has changed. If the browser has no room, the oldest conversations make some.
  keep(conversation) {
    if (!this.list.includes(conversation)) return;
    const open = (key, value) => (key === "open" ? undefined : value);
    while (this.list.length > 0) {
      try {
        localStorage.setItem(CONVERSATIONS, JSON.stringify(this.list, open));
        return;
      } catch {
        if (this.list[0] === conversation) return;
        this.list.shift();
      }
    }
  }

  remove(conversation) {
    this.list = this.list.filter((other) => other !== conversation);
    write(CONVERSATIONS, this.list);
  }

  settings() {
    return read(SETTINGS, {});
  }

  keepSettings(settings) {
    write(SETTINGS, settings);
  }
}

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch (error) {
    console.debug(error);
  }
}
