"""Uses the page of a server in a real browser: gives the key it asks for, chats, watches the figures.

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
        for domain in ["Page", "Runtime", "Log"]:
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
    # That a key is missing is an error in the browser's log, and the only one there may be.
    browser.value("document.getElementById('key').focus()")
    browser.type(key)
    browser.until("document.getElementById('model').textContent == 'tiny'")
    refused = len(browser.complaints)
    assert all("401" in complaint.get("text", "") for complaint in browser.complaints), browser.complaints

    answers = []
    for _ in range(2):
        begin(browser)
        browser.until("document.body.dataset.answers == '1'")
        answers.append(browser.value("document.querySelector('.assistant').textContent"))
    # A model that makes up its words may also say nothing, but hardly twice.
    assert any(answers), answers
    assert browser.value("document.querySelectorAll('.error').length") == 0

    # An answer can be stopped, and what came of it stays.
    begin(browser)
    browser.until("document.body.dataset.answers == '1' || document.querySelector('.assistant')?.textContent")
    browser.value("document.getElementById('send').click()")
    browser.until("document.body.dataset.answers == '1'")

    browser.until("/^[0-9.]+$/.test(document.getElementById('rate').textContent)")
    browser.until("/^0 [/] [1-9][0-9]*$/.test(document.getElementById('blocks').textContent)")
    assert browser.value("document.getElementById('running').textContent") == "0"
    browser.value("document.getElementById('clear').click()")
    assert browser.value("document.getElementById('messages').childElementCount") == 0
    assert len(browser.complaints) == refused, browser.complaints[refused:]
    print("the page works")


def begin(browser):
    """Asks something in a new conversation."""
    browser.value("document.getElementById('clear').click(); delete document.body.dataset.answers")
    browser.value("document.getElementById('text').focus()")
    browser.type("Hello")


if __name__ == "__main__":
    main(*sys.argv[1:])
