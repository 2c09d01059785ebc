"""Uses the page of a server in a real browser: gives the key it asks for, chats, watches the figures, changes its mind.

Usage: browser.py CHROMIUM URL KEY [FOLDER]

With FOLDER, it also saves pictures there for people to look at: each state of the page on a desktop and on a phone, in light
and in dark, as STATE-WIDTH-SCHEME.png.

Talks to the browser through the DevTools protocol over a pair of pipes. Needs nothing but Python.
"""

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib

PATIENCE = 60


class Browser:
    """A browser without a window, and the one page it shows."""

    def __init__(self, program, profile):
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()

        def wire():
            # The protocol is spoken on these two descriptors. Copied first, in case one of ours has a number of theirs.
            reading, writing = os.dup(to_browser), os.dup(from_browser)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        self.process = subprocess.Popen(
            [program, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=wire,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.buffer = b""
        self.number = 0
        self.session = None
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Accessibility"]:
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def receive(self):
        while b"\0" not in self.buffer:
            data = os.read(self.answers, 65536)
            assert data, "the browser has ended"
            self.buffer += data
        message, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(message["params"]["exceptionDetails"])
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"])
        return message

    def value(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def until(self, expression):
        """Waits until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < end, f"in vain: {expression}\n{self.value('document.body.innerText')}"
            time.sleep(0.05)

    def picture(self, **options):
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])

    def pixel(self, x, y):
        """The colour of a pixel of the page."""
        picture = self.picture(clip={"x": x, "y": y, "width": 1, "height": 1, "scale": 1})
        data, at = b"", 8
        while at < len(picture):
            length = int.from_bytes(picture[at : at + 4], "big")
            if picture[at + 4 : at + 8] == b"IDAT":
                data += picture[at + 8 : at + 8 + length]
            at += length + 12
        # The first byte says how the row is filtered, which changes nothing in a first pixel.
        return list(zlib.decompress(data)[1:4])

    def type(self, text):
        self.call("Input.insertText", text=text)
        self.enter()

    def enter(self, shift=False):
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, expression):
        """Clicks on an element as a hand does."""
        self.value(f"{expression}.scrollIntoView({{ block: 'nearest' }})")
        left, top, width, height = self.value(f"Object.values({expression}.getBoundingClientRect().toJSON()).slice(0, 4)")
        x, y = left + width / 2, top + height / 2
        for kind in ["mousePressed", "mouseReleased"]:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def main(program, url, key, folder=None):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            use(browser, url, key)
            if folder:
                take_pictures(browser, url, key, folder)
        finally:
            browser.process.kill()
            browser.process.wait()


def use(browser, url, key):
    browser.call("Page.navigate", url=url)
    browser.until("document.getElementById('key-dialog')?.open")
    # That a key is missing or wrong is an error in the browser's log, and the only one there may be.
    assert browser.value("document.getElementById('key-wrong').hidden")
    browser.value("document.getElementById('key').focus()")
    browser.type("wrong")
    browser.until("document.getElementById('key-dialog').open && !document.getElementById('key-wrong').hidden")
    is_readable_in_light_and_dark(browser)
    browser.value("document.getElementById('key').focus()")
    browser.type(key)
    browser.until("document.getElementById('model').textContent == 'tiny'")
    refused = len(browser.complaints)
    assert all("401" in complaint.get("text", "") for complaint in browser.complaints), browser.complaints

    answers = []
    for _ in range(2):
        begin(browser)
        browser.until("document.body.dataset.answers == '1'")
        answers.append(browser.value("document.querySelector('.assistant .content').textContent"))
    # A model that makes up its words may also say nothing, but hardly twice.
    assert any(answers), answers
    assert browser.value("document.querySelectorAll('.error').length") == 0

    # An answer can be stopped, and what came of it stays.
    begin(browser)
    browser.until("document.body.dataset.answers == '1' || document.querySelector('.assistant .content')?.textContent")
    browser.value("document.getElementById('send').click()")
    browser.until("document.body.dataset.answers == '1'")

    browser.until("/^[0-9.]+$/.test(document.getElementById('rate').textContent)")
    browser.until("/^0 [/] [1-9][0-9]*$/.test(document.getElementById('blocks').textContent)")
    assert browser.value("document.getElementById('running').textContent") == "0"
    browser.value("document.getElementById('clear').click()")
    assert browser.value("document.getElementById('messages').childElementCount") == 0
    assert len(browser.complaints) == refused, browser.complaints[refused:]

    keeps_answers_apart(browser)
    # Answers of a model that makes up its words have no end of their own.
    browser.value("localStorage.setItem('dsrun.settings', JSON.stringify({ max_tokens: 40 }))")
    recovers_from_errors(browser)
    leaves_readers_where_they_are(browser)
    changes_answers(browser)
    grows_with_its_text(browser)
    counts_the_tokens_of_an_answer(browser)
    measures_the_speed_of_an_answer(browser)
    copies_code(browser, url)
    is_readable_in_light_and_dark(browser)
    browser.value("document.getElementById('settings').click()")
    is_readable_in_light_and_dark(browser)
    browser.value("document.getElementById('settings-dialog').close()")
    renders_markdown(browser)
    fits_a_phone(browser)
    says_what_is_what(browser)
    keeps_conversations(browser, url)
    unexpected = [entry for entry in browser.complaints[refused:] if "400" not in entry.get("text", "")]
    assert not unexpected, unexpected
    print("the page works")


def watch_requests(browser):
    """Has the page note the bodies of its requests, and answer slowly."""
    browser.value("""
        globalThis.bodies = [];
        globalThis.plainFetch ??= fetch;
        globalThis.fetch = (path, options) => {
            if (options?.body) bodies.push(JSON.parse(options.body));
            return plainFetch(path, options);
        };
    """)


def keeps_answers_apart(browser):
    """A new conversation while an answer streams has nothing of the old one."""
    watch_requests(browser)
    begin(browser)
    browser.until("bodies.length == 1")
    begin(browser)
    browser.until("document.body.dataset.answers == '1'")
    assert browser.value("bodies.length") == 2
    assert browser.value("bodies[1].messages.length") == 1, browser.value("JSON.stringify(bodies[1])")
    assert browser.value("document.querySelectorAll('.message').length") == 2
    # The old one is in the list, with what came of its answer.
    assert browser.value("document.querySelectorAll('#conversations .title').length") >= 2


def recovers_from_errors(browser):
    """After a message that is too long, others are answered, and it is not lost."""
    watch_requests(browser)
    browser.value("document.getElementById('clear').click()")
    browser.value("document.getElementById('text').focus()")
    browser.type("too long " * 2000)
    browser.until("document.querySelector('.error') !== null")
    assert browser.value("document.getElementById('text').value.startsWith('too long')")
    browser.value("document.getElementById('text').value = ''")
    browser.value("document.getElementById('text').focus()")
    browser.type("Hello")
    browser.until("document.body.dataset.answers == '1'")
    assert browser.value("bodies.at(-1).messages.length") == 1
    assert browser.value("document.querySelectorAll('.error').length") == 0


def leaves_readers_where_they_are(browser):
    """Who has scrolled up stays there while an answer comes in."""
    browser.call("Emulation.setDeviceMetricsOverride", width=400, height=260, deviceScaleFactor=1, mobile=False)
    browser.value("document.getElementById('clear').click()")
    for count in range(1, 4):
        browser.value("document.getElementById('text').focus()")
        browser.type("Hello")
        browser.until(f"document.body.dataset.answers == '{count}'")
    messages = "document.getElementById('messages')"
    assert browser.value(f"{messages}.scrollHeight > {messages}.clientHeight + 100")
    browser.value("document.getElementById('text').focus()")
    browser.type("Hello")
    browser.value(f"{messages}.scrollTop = 0")
    browser.until("document.body.dataset.answers == '4'")
    assert browser.value(f"{messages}.scrollTop") == 0
    browser.call("Emulation.clearDeviceMetricsOverride")


def changes_answers(browser):
    """An answer can be had anew, a message edited, and an answer says how fast it was."""
    watch_requests(browser)
    begin(browser)
    browser.until("document.body.dataset.answers == '1'")
    press = "[...document.querySelectorAll('.below button')].find(button => button.textContent == '%s').click()"
    browser.value("delete document.body.dataset.answers")
    browser.value(press % "Regenerate")
    browser.until("document.body.dataset.answers == '1'")
    assert browser.value("bodies.length") == 2
    assert browser.value("JSON.stringify(bodies[0].messages) == JSON.stringify(bodies[1].messages)")
    browser.value(press % "Edit")
    assert browser.value("document.getElementById('text').value") == "Hello"
    assert browser.value("document.getElementById('messages').childElementCount") == 0
    browser.value("document.getElementById('settings').click()")
    browser.value("document.getElementById('system').value = 'Be brief.'; document.getElementById('max_tokens').value = 3")
    browser.value("document.getElementById('top_k').value = 0; document.getElementById('seed').value = 7")
    browser.value("document.querySelector('#settings-dialog button').click()")
    browser.until("localStorage.getItem('dsrun.settings').includes('Be brief.')")
    browser.value("document.getElementById('text').focus()")
    browser.type(" again")
    browser.until("document.body.dataset.answers == '1'")
    asked = browser.value("JSON.stringify(bodies[2].messages)")
    assert asked == '[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello again"}]', asked
    assert browser.value("JSON.stringify([bodies[2].max_tokens, bodies[2].top_k, bodies[2].seed])") == "[3,0,7]"
    assert browser.value("bodies[2].temperature === undefined")
    browser.value("localStorage.removeItem('dsrun.settings')")


def grows_with_its_text(browser):
    """The field is as high as its text, up to a part of the window, and small again once the text is sent."""
    text = "document.getElementById('text')"
    browser.value(f"document.getElementById('clear').click(); {text}.focus()")
    sizes = f"[{text}.offsetHeight, document.getElementById('send').offsetHeight]"
    single, button = browser.value(sizes)
    line = browser.value(f"parseFloat(getComputedStyle({text}).lineHeight)")
    browser.call("Input.insertText", text="line")
    for count in range(1, 4):
        browser.enter(shift=True)
        browser.call("Input.insertText", text="line")
        assert browser.value(f"{text}.value") == "\n".join(["line"] * (count + 1))
        height, beside = browser.value(sizes)
        assert abs(height - single - count * line) <= 1, (single, line, count, height)
        assert beside == button, "the button grows too"
        assert browser.value(f"{text}.scrollHeight <= {text}.clientHeight"), "it scrolls before it must"
    browser.call("Input.insertText", text="\nline" * 60)
    assert 6 * line < browser.value(f"{text}.offsetHeight") <= browser.value("innerHeight * 0.4 + 1")
    assert browser.value(f"{text}.scrollHeight > {text}.clientHeight")
    assert browser.value("document.querySelectorAll('.message').length") == 0
    browser.value("localStorage.setItem('dsrun.settings', JSON.stringify({ max_tokens: 40, temperature: 0 }))")
    browser.enter()
    browser.until("document.body.dataset.answers == '1'")
    assert browser.value(f"{text}.offsetHeight") == single


def counts_the_tokens_of_an_answer(browser):
    """Below an answer is how many tokens the server says that it has, and a speed."""
    browser.value("""
        globalThis.fetch = async (path, options) => {
            const response = await plainFetch(path, options);
            if (options?.body) response.clone().text().then((text) => {
                globalThis.counted = Number(text.match(/"completion_tokens":([0-9]+)/)?.[1]);
            });
            return response;
        };
    """)
    begin(browser)
    browser.until("document.body.dataset.answers == '1' && globalThis.counted !== undefined")
    count, rate = figures(browser)
    assert count == browser.value("counted") > 1, count
    assert rate > 0
    browser.value("globalThis.fetch = plainFetch")


def measures_the_speed_of_an_answer(browser):
    """The speed is that of the tokens after the first; where they come in one piece, that of the request."""
    for before, between, most in [(300, 0, 21 / 0.3), (0, 500, 20 / 0.5)]:
        browser.value("""
            globalThis.fetch = async (path, options) => {
                if (!options?.body) return plainFetch(path, options);
                const pause = (time) => new Promise((done) => setTimeout(done, time));
                const data = (content, usage) => JSON.stringify({ choices: [{ delta: { content } }], usage });
                const event = (content, usage) => `data: ${data(content, usage)}\n\n`;
                const first = event("`Code` [here](https://example.org):\\n\\n> so\\n\\n```py\\nfirst()\\n");
                const rest = event("  second('<&>')\\n```\\n", { completion_tokens: 21 }) + "data: [DONE]\\n\\n";
                await pause(BEFORE);
                return new Response(new ReadableStream({
                    async start(stream) {
                        for (const piece of BETWEEN ? [first, rest] : [first + rest]) {
                            stream.enqueue(new TextEncoder().encode(piece));
                            await pause(BETWEEN);
                        }
                        stream.close();
                    },
                }));
            };
        """.replace("BEFORE", str(before)).replace("BETWEEN", str(between)))
        start = time.monotonic()
        begin(browser)
        browser.until("document.body.dataset.answers == '1'")
        least = 20 / (time.monotonic() - start)
        browser.value("globalThis.fetch = plainFetch")
        count, rate = figures(browser)
        assert count == 21 and least - 1 <= rate <= most + 1, (least, count, rate, most)


def figures(browser):
    """The tokens of the shown answer, and the tokens in a second."""
    text = browser.value("document.querySelector('.assistant .figures')?.textContent") or ""
    found = re.fullmatch("([0-9]+) tokens, ([0-9.]+) tokens/s", text)
    assert found, text
    return int(found[1]), float(found[2])


def copies_code(browser, url):
    """A click copies the code or the message, with a clipboard and without, and the button says whether it did."""
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.call("Browser.grantPermissions", permissions=permissions, origin=url.rstrip("/"))
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    code = "first()\n  second('<&>')\n"
    block = "document.querySelector('.assistant .code > .copy')"
    whole = "document.querySelector('.assistant .below button')"
    browser.value("""
        globalThis.clipboard = navigator.clipboard;
        globalThis.pretend = (value) => Object.defineProperty(navigator, "clipboard", { value, configurable: true }) && null;
    """)
    for has in ["clipboard", "undefined"]:
        browser.value(f"pretend({has})")
        for button, text in [(block, code), (whole, f"`Code` [here](https://example.org):\n\n> so\n\n```py\n{code}```\n")]:
            browser.value("clipboard.writeText('something else')")
            browser.click(button)
            browser.until(f"{button}.textContent == 'Copied'")
            assert browser.value("clipboard.readText()") == text, (has, text)
            browser.until(f"{button}.textContent == 'Copy'")
    browser.value("pretend({ writeText: () => Promise.reject(new Error('no')) })")
    browser.click(block)
    browser.until(f"{block}.textContent == 'Not copied'")
    browser.until(f"{block}.textContent == 'Copy'")
    browser.value("delete navigator.clipboard")


def is_readable_in_light_and_dark(browser):
    """The page is light or dark as its reader wants, and all its text has the contrast that WCAG asks for, 4.5."""
    for scheme in ["light", "dark"]:
        prefer(browser, scheme)
        ground = browser.pixel(2, browser.value("innerHeight - 2"))
        # Behind a dialog, white is 153.
        assert min(ground) > 130 if scheme == "light" else max(ground) < 40, (scheme, ground)
        faint, texts = browser.value("""(() => {
            const canvas = new OffscreenCanvas(1, 1).getContext("2d");
            const paint = (color, opacity) => {
                canvas.globalAlpha = opacity;
                canvas.fillStyle = color;
                canvas.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data]
                    .map((value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const contrast = (node, part) => {
                const above = [];
                for (let one = node; one; one = one.parentElement) above.unshift(getComputedStyle(one));
                if (part) above.push(getComputedStyle(node, part));
                let ground = paint("rgb(GROUND)", 1);
                for (const style of above) ground = paint(style.backgroundColor, 1);
                const ink = paint(above.at(-1).color, above.reduce((all, style) => all * style.opacity, 1));
                return (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
            };
            const found = [];
            // What is behind a dialog cannot be used.
            for (const node of (document.querySelector("dialog[open]") ?? document.body).querySelectorAll("*")) {
                if (!node.checkVisibility()) continue;
                const own = [...node.childNodes].some((child) => child.nodeType == 3 && child.data.trim());
                if (own) found.push([node.outerHTML.slice(0, 100), contrast(node)]);
                if (node.placeholder) found.push([node.outerHTML, contrast(node, "::placeholder")]);
            }
            return [found.filter(([, ratio]) => ratio < 4.5), found.length];
        })()""".replace("GROUND", ", ".join(map(str, ground))))
        assert texts >= 4, texts
        assert not faint, (scheme, faint)
    prefer(browser, "")


def renders_markdown(browser):
    """Markdown becomes nodes, code can be copied, and nothing of it runs or loads."""
    browser.value("""
        import("/markdown.js").then(({ render }) => {
            const text = "# A\\n\\n- **b** <img src=x onerror=alert(1)><script>alert(1)</" + "script>" +
                "[c](javascript:alert(1)) [d](https://example.org)\\n\\n```py\\nprint(1 < 2)\\n```\\n\\n|e|f|\\n|-|-|\\n|1|2|\\n\\n- [x] g\\n- [ ] h";
            const place = document.createElement("div");
            place.append(render(text));
            globalThis.rendered = place;
        });
    """)
    browser.until("globalThis.rendered !== undefined")
    for selector in ["h1", "li strong", "pre code", ".code > button.copy", "table td", "li.task", "a[href='https://example.org']"]:
        assert browser.value(f'rendered.querySelector("{selector}") !== null'), selector
    for selector in ["img", "script", "[onerror]", "a[href^=javascript]"]:
        assert browser.value(f'rendered.querySelector("{selector}") === null'), selector
    assert browser.value("rendered.querySelector('pre code').textContent") == "print(1 < 2)\n"
    assert browser.value("['☑ g', '☐ h'].every(item => rendered.textContent.includes(item))")
    # The button to copy code stays where it is when the code is scrolled.
    assert browser.value('''(() => {
        const place = document.createElement("div");
        place.className = "content";
        place.append(rendered);
        document.getElementById("messages").append(place);
        rendered.querySelector("pre code").textContent = "wide ".repeat(1000);
        const button = rendered.querySelector(".copy");
        const before = button.getBoundingClientRect().left;
        rendered.querySelector("pre").scrollLeft = 500;
        const moved = button.getBoundingClientRect().left - before;
        const scrolled = rendered.querySelector("pre").scrollLeft;
        place.remove();
        return scrolled == 500 && moved == 0;
    })()''')


def fits_a_phone(browser):
    """On a phone the header has one row, nothing is cut off at the side, and the list opens over the page."""
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True)
    assert browser.value("document.querySelector('header').offsetHeight") < 60
    assert browser.value("document.documentElement.scrollWidth") <= 360
    assert browser.value("getComputedStyle(document.getElementById('conversations')).display") == "none"
    browser.value("document.getElementById('menu').click()")
    assert browser.value("getComputedStyle(document.getElementById('conversations')).display") == "block"
    browser.value("document.getElementById('chat').click()")
    assert browser.value("getComputedStyle(document.getElementById('conversations')).display") == "none"
    assert browser.value("document.getElementById('menu').ariaExpanded") == "false"
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.until("getComputedStyle(document.getElementById('conversations')).display != 'none'")


def says_what_is_what(browser):
    """The accessibility tree has names and roles."""
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node.get("role", {}).get("value"), node.get("name", {}).get("value")) for node in nodes}
    for expected in [
        ("log", "Conversation"),
        ("navigation", "Conversations"),
        ("textbox", "Your message"),
        ("button", "New conversation"),
        ("button", "Settings"),
        ("article", "You"),
        ("article", "Assistant"),
    ]:
        assert expected in named, (expected, sorted(map(str, named)))


def keeps_conversations(browser, url):
    """A conversation is there after the page was loaded anew, and can be deleted."""
    text = browser.value("document.getElementById('messages').textContent")
    assert text
    count = browser.value("document.querySelectorAll('#conversations .title').length")
    browser.call("Page.navigate", url=url)
    browser.until("document.getElementById('model')?.textContent == 'tiny'")
    assert browser.value("document.getElementById('messages').textContent") == text
    assert browser.value("document.querySelectorAll('#conversations .title').length") == count
    browser.value("document.querySelector('[aria-current] [aria-label^=Delete]').click()")
    assert browser.value("document.querySelectorAll('#conversations .title').length") == count - 1


def begin(browser):
    """Asks something in a new conversation."""
    browser.value("document.getElementById('clear').click(); delete document.body.dataset.answers")
    browser.value("document.getElementById('text').focus()")
    browser.type("Hello")


# A conversation with what answers have in them, as the page keeps it.
CONVERSATION = [
    {"role": "user", "content": "How do I read a file in Python, line by line? And what does it cost in memory?"},
    {"role": "assistant", "figures": "182 tokens, 64 tokens/s", "content": """## Line by line

A file is its own iterator, so **only one line** is in memory at a time. See `open` in [the docs](https://docs.python.org).

```py
with open("story.txt", encoding="utf-8") as lines:
    for number, line in enumerate(lines, start=1):
        print(f"{number:>4}  {line.rstrip()}")  # a comment that is so long that the block must be scrolled on a phone
```

1. The file is closed at the end, also on `break`.

| way | memory | when |
|---|---:|---|
| `for line in lines` | one line | nearly always |

> A line without an end can still be as large as the file.

- [x] closed"""},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "figures": "4 tokens, 58 tokens/s", "reasoning": "So.", "content": "It was nothing."},
]


def take_pictures(browser, url, key, folder):
    """Saves what people would see, to be looked at."""
    os.makedirs(folder, exist_ok=True)
    titles = ["Names for a cat", "A rather long question about the history of the typewriter", "Read a file"]
    kept = [{"title": title, "messages": CONVERSATION, "error": None} for title in titles]

    def load(key, conversations):
        browser.value(f"localStorage.clear(); sessionStorage.setItem('key', {json.dumps(key)})")
        browser.value(f"localStorage['dsrun.conversations'] = JSON.stringify({json.dumps(conversations)})")
        browser.call("Page.navigate", url=url)
        browser.until("document.getElementById('%s" % ("key-dialog')?.open" if key == "wrong" else "model')?.textContent"))

    for width, height in [(1280, 800), (390, 844)]:
        phone = width < 500
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        browser.call("Emulation.setDeviceMetricsOverride", **size)
        for scheme in ["light", "dark"]:
            prefer(browser, scheme)

            def save(state):
                browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                with open(os.path.join(folder, f"{state}-{width}-{scheme}.png"), "wb") as file:
                    file.write(browser.picture())

            load("wrong", [])
            save("wrong-key")
            load(key, [])
            save("empty")
            load(key, kept)
            save("conversation-end")
            browser.value("document.getElementById('messages').scrollTop = 0")
            save("conversation")
            if phone:
                browser.value("document.getElementById('menu').click()")
                save("list")
            browser.value("document.getElementById('chat').click(); document.getElementById('settings').click()")
            save("settings")
            load(key, [])
            browser.type("too long " * 2000)
            browser.until("document.querySelector('.error') !== null")
            save("error")


def prefer(browser, scheme):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


if __name__ == "__main__":
    main(*sys.argv[1:])
