"""Uses the page of a server in a real browser: gives the key it asks for, chats, watches the figures, changes its mind.

Usage: browser.py CHROMIUM URL KEY

Talks to the browser through the DevTools protocol over a pair of pipes. Needs nothing but Python.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

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
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression):
        """Waits until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < end, f"in vain: {expression}\n{self.value('document.body.innerText')}"
            time.sleep(0.05)

    def type(self, text):
        self.call("Input.insertText", text=text)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter", windowsVirtualKeyCode=13)


def main(program, url, key):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            use(browser, url, key)
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
    for selector in ["h1", "li strong", "pre code", ".code > button.copy", "table td", "a[href='https://example.org']"]:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
