"""A picture of the chat page with one answer, for the README. Needs Chromium and its ChromeDriver.

molink demo
python tools/page_screenshot.py docs/page.png [--question "What is molink?"]
"""

import argparse
import base64
import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from molinkd.cli import local_daemon

#: As much as a first answer may take, in seconds.
_PATIENCE_S = 120.0
#: The key by which W3C WebDriver names an element.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A headless Chromium, by the W3C WebDriver protocol."""

    def __init__(self, driver: str, width: int, height: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._driver = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL)
        self._root = f"http://127.0.0.1:{port}"
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        arguments += ["--disable-background-networking", "--force-device-scale-factor=1.5"]
        arguments += [f"--window-size={width},{height}"]
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}}
        self._until_listening()
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._root += f"/session/{made['sessionId']}"

    def close(self) -> None:
        """End the browser and its driver."""
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()

    def open(self, url: str) -> None:
        """Show a page."""
        self._call("POST", "/url", {"url": url})

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        where = {"using": "css selector", "value": selector}
        element = self._call("POST", "/element", where)[_ELEMENT]
        self._call("POST", f"/element/{element}/value", {"text": text})

    def wait_for(self, selector: str) -> None:
        """Until there is such an element; raises :class:`TimeoutError`."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._call("POST", "/elements", {"using": "css selector", "value": selector}):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {selector} on the page after {_PATIENCE_S:g} s")
            time.sleep(0.2)

    def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def _until_listening(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._call("GET", "/status")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, method=method)
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)["value"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--question", default="What is molink?")
    parser.add_argument("--driver", default="chromedriver")
    parser.add_argument("--width", type=int, default=760)
    parser.add_argument("--height", type=int, default=500)
    options = parser.parse_args()
    endpoint = local_daemon.need_daemon(None).endpoints[0]
    browser = Browser(options.driver, options.width, options.height)
    try:
        browser.open(endpoint)
        browser.wait_for("#model option")
        browser.type("#text", options.question + "\n")
        browser.wait_for(".note")
        options.file.write_bytes(browser.picture())
    finally:
        browser.close()


if __name__ == "__main__":
    main()
