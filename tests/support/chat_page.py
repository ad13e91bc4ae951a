"""Steps of the chat page tests in a headless Chromium."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_backend import FakeBackend
from tools.browser import ENTER, Browser, find_driver

needs_chromium = pytest.mark.skipif(
    find_driver() is None,
    reason="needs Chromium and its ChromeDriver on the PATH (apt-get install chromium-driver)",
)

#: axe-core 4.14.1 (MPL-2.0) as npm has it: ``npm pack axe-core``.
AXE = Path(__file__).parent / "axe" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
#: WCAG 2.2 AA, and what axe-core advises besides.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def load_axe(browser: Browser) -> None:
    """Load axe-core into the page."""
    source = AXE.read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(source).hexdigest() == AXE_SHA256
    browser.run(source.decode())
    assert browser.run("return axe.version") == "4.14.1"


def check_page(browser: Browser, *rules: str) -> list[tuple[str, str]]:
    """Violations that axe-core finds on the page: rule and element."""
    options = {"resultTypes": ["violations"]}
    options |= {"runOnly": list(rules)} if rules else {"runOnly": RULES}  # type: ignore[dict-item]
    found: list[dict[str, Any]] = browser.run(
        "return (await axe.run(arguments[0])).violations", options
    )
    return [(one["id"], node["html"][:120]) for one in found for node in one["nodes"]]


def wait_until_ready(browser: Browser) -> Browser:
    """Wait until the page knows the model."""
    browser.until("document.querySelector('#model').value === 'tiny'")
    return browser


def ask_question(browser: Browser, question: str) -> None:
    """Send a question, and wait for the end of the answer."""
    count = browser.run("return document.querySelectorAll('.theirs').length")
    browser.type("#text", question + ENTER)
    browser.until(f"document.querySelectorAll('.theirs').length > {count}")
    browser.until("!document.querySelector('.live')")


def sent_prompt(backend: FakeBackend) -> str:
    """The last prompt that the model got, as text."""
    return str(backend.tokenizer.decode(list(backend.requests[-1].prompt_token_ids)))


def release_tokens(server_gate: asyncio.Semaphore, backend: FakeBackend, count: int) -> None:
    """Release ``count`` tokens."""
    assert backend.loop is not None
    for _ in range(count):
        backend.loop.call_soon_threadsafe(server_gate.release)
