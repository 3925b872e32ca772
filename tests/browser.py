"""Headless Chromium, driven through pipes by its DevTools protocol; no other package is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ROOT = Path(__file__).resolve().parents[1]
AXE = Path(os.environ.get("AXE_CORE") or ROOT / "node_modules" / "axe-core" / "axe.min.js")
# Rules of WCAG 2.1, levels A and AA, and what axe calls best practice.
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


# Numbers of the keys that do something by themselves.
KEYS = {"Tab": 9, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38}
KEYS |= {"ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page of a browser; `evaluate` runs JavaScript in it."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp()
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        command = [BROWSER, "--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars"]
        command += ["--remote-debugging-pipe", "--disable-dev-shm-usage", "--no-first-run"]
        command += [f"--user-data-dir={self._profile}", "about:blank"]

        # Chromium reads from 3 and writes to 4. A shell makes them so: Python would have to fork.
        shell = ["sh", "-c", f'exec "$@" 3</dev/fd/{theirs_in} 4>/dev/fd/{theirs_out}', "sh"]
        self._process = subprocess.Popen(
            [*shell, *command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._number, self.events = b"", 0, []
        self._session = None
        pages = self.send("Target.getTargets")["targetInfos"]
        (target,) = (page["targetId"] for page in pages if page["type"] == "page")
        found = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result; keeps the events before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 120
        while True:
            answer = self._message(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 2**16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression, once it is there if it is a promise."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.send("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Waits until an expression is true."""
        until = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < until, f"{condition} did not come true"
            time.sleep(0.05)

    def open(self, address: str, ready: str = "document.readyState === 'complete'") -> None:
        """Opens a page and waits until it is ready."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)
        self.wait(f"location.href !== 'about:blank' && document.body && ({ready})")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, value: Any) -> None:
        """Sets a control as a user does, with its events."""
        self.evaluate(
            f"{{const node = document.querySelector({json.dumps(selector)});"
            f"node.value = {json.dumps(value)};"
            "for (const kind of ['input', 'change'])"
            "node.dispatchEvent(new Event(kind, {bubbles: true}));}"
        )

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def press(self, key: str, code: str = "") -> None:
        """Presses and releases a key where the focus is."""
        named = {"key": key, "code": code or key}
        if key in KEYS:
            named["windowsVirtualKeyCode"] = KEYS[key]
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def look(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Sets the size of the window, and the theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.send("Emulation.setDeviceMetricsOverride", mobile=width < 600, **size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])

    def picture(self, file: Path) -> None:
        """Writes a picture of the whole page."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def problems(self) -> list[str]:
        """Errors of scripts and of the page's policy so far."""
        self.evaluate("1")
        found = [e["params"] for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        said = [str(e["exceptionDetails"]) for e in found]
        logs = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        return said + [entry["text"] for entry in logs if entry["level"] == "error"]

    def accessibility(self) -> list[str]:
        """Violations that axe-core finds in the page: rule and first element of each."""
        self.send("Runtime.evaluate", expression=AXE.read_text())
        found = self.evaluate(
            f"axe.run(document, {{runOnly: {json.dumps(TAGS)}}}).then(r => r.violations.map("
            "v => `${v.id}: ${v.nodes[0].html.slice(0, 120)} ${v.nodes[0].failureSummary}`))"
        )
        return found
