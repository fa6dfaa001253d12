"""A headless Chromium, spoken to by its debugging protocol over two pipes: no driver, no package.

https://chromedevtools.github.io/devtools-protocol/ has the methods.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--remote-debugging-pipe",
)
# The browser reads from descriptor 3 and writes to 4. The pipes may have these numbers themselves.
_START = """
import os, sys
reads, writes = (os.dup(int(end)) for end in sys.argv[1:3])
os.dup2(os.dup2(reads, 90), 3), os.dup2(os.dup2(writes, 91), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE_SECONDS = 60.0
_ARROWS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
_SCHEMES = ("file:", "data:", "blob:", "about:", "chrome:")


class Tab:
    """One page. What it logs, what goes wrong in it and what it asks of a network is collected."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: Optional[str] = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:  # a process that was stopped meanwhile has written a part
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def size(self, width: int, height: int, dark: Optional[bool] = None) -> None:
        """The size of the window in CSS pixels, and the colours that the system asks for."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        if dark is not None:
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.wait_for(f"innerWidth === {width}")
        self.settle()

    def open(self, path: Path, ready: str) -> None:
        """Opens a file; returns when the JavaScript expression ``ready`` is true, and figures are
        drawn.
        """
        self.call("Page.navigate", url="about:blank")
        self.wait_for("location.href === 'about:blank'")
        url = path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && ({ready})")
        self.settle()

    def settle(self) -> None:
        """Waits for the frame after the next: until then figures whose place has another size now
        are drawn, and a scroll is told.
        """
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => done(true)))"
        self.value(f"new Promise(done => {frames})")

    def wait_for(self, expression: str) -> None:
        """Waits until the JavaScript expression is true; raises TimeoutError after a minute."""
        end = time.monotonic() + _PATIENCE_SECONDS
        tried = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        while not self.value(tried):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} did not become true; {self.problems}")
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it gives."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Moves the mouse to a place of the window, in CSS pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="none")

    def click(self, x: float, y: float) -> None:
        """A click of the left button at a place of the window, in CSS pixels."""
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key by its name: ``ArrowRight``, ``Enter``."""
        code = {"Enter": 13, "Home": 36, **_ARROWS}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
            )

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Writes what is shown as PNG; with ``whole`` the page from top to bottom."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], _PATIENCE_SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser has exited")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str(parameters["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(str(parameters["entry"]))
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(_SCHEMES) or url.startswith("file:"):
                self.requests.append(url)


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A browser of its own, with a profile of its own, that ends with the block."""
    assert PROGRAM is not None
    # Its socket is in TMPDIR; the path of a socket has at most 107 bytes.
    profile = tempfile.mkdtemp(prefix="fastcheck-browser-", dir="/tmp")
    to_browser, from_browser = os.pipe(), os.pipe()

    ends = to_browser[0], from_browser[1]
    flags = [*_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _START, *map(str, ends), PROGRAM, *flags, "about:blank"],
        pass_fds=ends,
        env={**os.environ, "TMPDIR": "/tmp"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Tab(to_browser[1], from_browser[0])
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
        shutil.rmtree(profile, ignore_errors=True)
