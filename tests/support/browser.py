"""Control a headless Chromium over its debugging protocol."""

import fcntl
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--hide-scrollbars", "--disable-extensions", "--disable-dev-shm-usage",
]  # fmt: skip

KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
        "ArrowDown": 40, " ": 32, "+": 187, "-": 189, "0": 48}  # fmt: skip
_TEXTS = {"Enter": "\r", " ": " "}


class Browser:
    """One page of one browser. ``errors`` are messages of its console and security policy."""

    def __init__(self, program: str, profile: Path):
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (theirs_read, theirs_write)]
        flags = [*FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            [program, *flags],
            # It reads commands from its file 3 and answers on its file 4.
            preexec_fn=lambda: [os.dup2(end, place) for place, end in enumerate(high, 3)],
            pass_fds=(3, 4),
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_read, theirs_write, *high):
            os.close(end)
        self._in = os.fdopen(ours_read, "rb", buffering=0)
        self._out = os.fdopen(ours_write, "wb", buffering=0)
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._session = ""
        targets = self.ask("Target.getTargets")["targetInfos"]
        (page,) = (target for target in targets if target["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in.fileno(), 1 << 16)
            assert more, "the browser ended"
            self._rest += more
        one, _, self._rest = self._rest.partition(b"\0")
        return json.loads(one)

    def open(self, page: Path) -> None:
        self.visit(page.as_uri())

    def visit(self, address: str) -> None:
        """Open a page and wait until it is loaded."""
        self._events.clear()
        self.ask("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())

    def look(self, width: int, theme: str, height: int = 1000) -> None:
        """Emulate a screen of this size, with a preferred colour scheme."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value; a promise is awaited."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True,
                         awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Send a key to the element that has the focus."""
        facts = {"key": key, "code": "Space" if key == " " else key,
                 "windowsVirtualKeyCode": KEYS[key]}  # fmt: skip
        text = {"text": _TEXTS[key]} if key in _TEXTS else {}
        down = "keyDown" if text else "rawKeyDown"
        self.ask("Input.dispatchKeyEvent", type=down, **facts, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **facts)

    def click(self, place: dict[str, float]) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)

    def write(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    @property
    def errors(self) -> list[dict[str, Any]]:
        self.run("1")  # earlier messages arrive before its answer
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self._events if event.get("method") in bad]

    def close(self) -> None:
        self._session = ""
        try:
            self.ask("Browser.close")
        finally:
            self._in.close()
            self._out.close()
            if self.process.poll() is None:
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
