"""A headless Chromium over W3C WebDriver; needs ChromeDriver."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

#: Longest wait for anything, in seconds.
PATIENCE_S = 60.0
#: WebDriver's key of an element.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
#: What the driver prints once it listens.
_LISTENS = re.compile(r"successfully on port (\d+)")
_DRIVERS = ("chromedriver", "chromium.chromedriver")
#: WebDriver's special keys.
ESCAPE, ENTER, SHIFT = "\ue00c", "\ue007", "\ue008"


def find_driver() -> str | None:
    """Find ChromeDriver on the PATH."""
    return next((path for name in _DRIVERS if (path := shutil.which(name))), None)


class Browser:
    """One window. What it does not find within :data:`PATIENCE_S` is a :class:`TimeoutError`."""

    def __init__(self, driver: str, width: int, height: int, scale: float = 1.0) -> None:
        # It picks a port itself: another process could take one found free here.
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        arguments += ["--disable-dev-shm-usage"]  # it is small in a container
        arguments += ["--disable-background-networking", f"--force-device-scale-factor={scale}"]
        arguments += [f"--window-size={width},{height}"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            self._root = f"http://127.0.0.1:{self._read_port()}"
            made = self._call_driver("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end_driver()
            raise
        self._root += f"/session/{made['sessionId']}"

    def close(self) -> None:
        """End the browser and its driver."""
        try:
            self._call_driver("DELETE", "")
        finally:
            self._end_driver()

    def open(self, url: str) -> None:
        """Show a page."""
        self._call_driver("POST", "/url", {"url": url})

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self._call_driver("POST", f"/element/{self._find_element(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Click a visible, uncovered element."""
        self._call_driver("POST", f"/element/{self._find_element(selector)}/click", {})

    def run(self, script: str, *args: object) -> Any:
        """Run a function body and return its (awaited) result."""
        return self._call_driver("POST", "/execute/sync", {"script": script, "args": list(args)})

    def until(self, expression: str, *args: object) -> Any:
        """Wait until a JavaScript expression is true; returns it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.run(f"return {expression}", *args)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true after {PATIENCE_S:g} s: {expression}")
            time.sleep(0.02)
        return found

    def wait_for(self, selector: str) -> None:
        """Wait for an element."""
        self.until("document.querySelector(arguments[0]) !== null", selector)

    def text(self, selector: str) -> str:
        """Joined text of all matching elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map(n => n.innerText).join()"
        return str(self.run(script, selector))

    def emulate(self, command: str, **parameters: object) -> Any:
        """A command of Chromium's own protocol, such as ``Emulation.setEmulatedMedia``."""
        return self._call_driver(
            "POST", "/goog/cdp/execute", {"cmd": command, "params": parameters}
        )

    def complaints(self) -> list[str]:
        """Console errors since the last call."""
        entries = self._call_driver("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self._call_driver("GET", "/screenshot"))

    def _find_element(self, selector: str) -> str:
        where = {"using": "css selector", "value": selector}
        return str(self._call_driver("POST", "/element", where)[_ELEMENT])

    def _end_driver(self) -> None:
        self._driver.terminate()
        self._driver.wait()
        assert self._driver.stdout is not None
        self._driver.stdout.close()

    def _read_port(self) -> int:
        """Wait until the driver listens; returns its port."""
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := _LISTENS.search(line):
                return int(found[1])
        raise RuntimeError("ChromeDriver ended before it listened")

    def _call_driver(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                problem = json.load(error)["value"]
            raise RuntimeError(
                f"{problem['error']}: {problem['message'].splitlines()[0]}"
            ) from None
