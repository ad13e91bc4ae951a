"""Picture of the chat page with one answer; needs Chromium and ChromeDriver.

molink demo
python -m tools.page_screenshot docs/page.png [--question "What is molink?"]
"""

import argparse
from pathlib import Path

from molinkd.cli import daemon_client as local_daemon
from tools.browser import Browser, find_driver


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--question", default="What is molink?")
    parser.add_argument("--driver", default=find_driver() or "chromedriver")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=760)
    options = parser.parse_args()
    endpoint = local_daemon.require_daemon(None).endpoints[0]
    browser = Browser(options.driver, options.width, options.height, scale=1.5)
    try:
        browser.open(endpoint)
        browser.wait_for("#model option")
        browser.click("#open-swarm")
        browser.type("#text", options.question + "\n")
        browser.until("/tokens, .* tokens.s/.test(document.querySelector('.note')?.textContent)")
        browser.wait_for(".ring .stage")
        options.file.write_bytes(browser.picture())
    finally:
        browser.close()


if __name__ == "__main__":
    main()
