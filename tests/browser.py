"""Chromium without a window, driven through two pipes: it opens a page as a screen of a given
width shows it, runs JavaScript in it, and photographs it."""

import base64
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from PIL import Image

# chromium-headless-shell is Debian's smaller package of the same browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-headless-shell")
SCREENS = [(width, is_dark) for width in (390, 1280) for is_dark in (False, True)]
PATIENCE_S = 120  # then the browser is killed, and the call fails


class Browser:
    def __init__(self, folder: Path):
        """`folder` gets the profile of the browser. OSError if it does not start."""
        inbox = folder / "inbox"
        outbox = folder / "outbox"
        os.mkfifo(inbox)
        os.mkfifo(outbox)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--disable-dev-shm-usage", f"--user-data-dir={folder}/profile"]
        # the browser reads commands from descriptor 3 and answers on 4
        redirected = f'exec "$@" 3<{inbox} 4>{outbox}'
        command = ["sh", "-c", redirected, "sh", CHROMIUM, *flags, "--remote-debugging-pipe"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.deadline = threading.Timer(PATIENCE_S, self.process.kill)
        self.deadline.start()
        self.commands = os.open(inbox, os.O_WRONLY)
        self.answers = os.open(outbox, os.O_RDONLY)
        self.unread = b""
        self.session = None
        self.num_commands = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        self.deadline.cancel()
        os.close(self.commands)
        os.close(self.answers)

    def call(self, method: str, **parameters) -> dict:
        """A command of the DevTools protocol, and its result."""
        self.num_commands += 1
        command = {"id": self.num_commands, "method": method, "params": parameters}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.num_commands:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def read(self) -> dict:
        """The next answer or event; each ends with a zero byte."""
        while b"\0" not in self.unread:
            data = os.read(self.answers, 1 << 16)
            if not data:
                raise OSError("chromium has ended")
            self.unread += data
        answer, _, self.unread = self.unread.partition(b"\0")
        return json.loads(answer)

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Open a page on a screen of `width` pixels; a narrow one is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        # no event is awaited: a page may have its scripts disabled
        while self.run("document.readyState") != "complete":
            time.sleep(0.05)

    def run(self, script: str):
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def photograph(self, file: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        answer = self.call(
            "Page.captureScreenshot", clip=size | {"scale": 1}, captureBeyondViewport=True
        )
        file.write_bytes(base64.b64decode(answer["data"]))


# Lines that run over their card or the screen, and texts that are cut: at the side, or below on a
# phone, where nobody sees that a box scrolls. Texts in pictures scale with them.
FAULTS = """
(() => {
  const screen = document.documentElement.clientWidth;
  const CARDS = "details, summary, .turn, aside, td, p, body";
  const faults = [];
  function check(name, box, parent) {
    const card = parent.closest(CARDS).getBoundingClientRect();
    const right = Math.min(card.right, screen);
    if (box.width > 0 && (box.right > right + 1 || box.left < card.left - 1))
      faults.push(`${name} from ${box.left} to ${box.right}, its card to ${card.right}`);
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (text.parentElement.closest("svg, script")) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const start = text.data.trim().slice(0, 40);
    for (const box of range.getClientRects()) check(start, box, text.parentElement);
  }
  for (const element of document.body.querySelectorAll(":not(svg *, script)")) {
    const name = `${element.tagName}.${element.className}`;
    check(name, element.getBoundingClientRect(), element.parentElement);
    const style = getComputedStyle(element);
    if (style.overflow === "visible") continue;
    if (element.scrollWidth > element.clientWidth + 1) faults.push(`${name} is cut at its side`);
    if (screen < 600 && element.scrollHeight > element.clientHeight + 1)
      faults.push(`${name} is cut below`);
  }
  if (document.documentElement.scrollWidth > screen) faults.push("wider than the screen");
  return faults;
})()
"""


def check_screen(browser: Browser, file: Path, is_dark: bool) -> None:
    """Nothing of the open page runs over or is cut, and its ground is light or dark. `file` gets
    its photograph."""
    assert browser.run(FAULTS) == []
    browser.photograph(file)
    with Image.open(file) as photograph:
        brightness = sum(photograph.convert("RGB").getpixel((2, 2))) / 3
    assert brightness < 64 if is_dark else brightness > 192
