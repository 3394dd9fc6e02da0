"""Chromium as it is driven through its pipe: any width, light or dark, screen or print."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium")


class Browser:
    """One headless Chromium with one page; `close` ends it."""

    def __init__(self, profile: Path):
        ours, self._out = os.pipe()  # Chromium reads its commands from 3 and answers at 4
        self._answers, theirs = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars"
        line = f'exec "$0" {options} "--user-data-dir=$1" --remote-debugging-pipe'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f"{line} 3<&{ours} 4>&{theirs} 2>/dev/null",
                str(CHROMIUM),
                str(profile),
            ],
            pass_fds=(ours, theirs),
        )
        os.close(ours)
        os.close(theirs)
        self._numbers, self._rest, self._session, self.events = itertools.count(1), b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        """Call a method of the DevTools protocol; what happens meanwhile is in `events`."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            some = os.read(self._answers, 1 << 16)
            assert some, "chromium has ended"
            self._rest += some
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, height: int, *, dark: bool = False, media: str = ""):
        """Show a page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in [each.get("method") for each in self.events]:
            self.events.append(self._read())

    def evaluate(self, script: str):
        """Return what an expression of JavaScript is."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Save what is seen, or the whole page, as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self.call("Browser.close")
        self._process.wait(timeout=30)
        os.close(self._out)
        os.close(self._answers)
