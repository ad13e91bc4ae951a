"""Steps of the chat page tests in a headless Chromium."""

import asyncio

import pytest

from tests.support.fake_backend import FakeBackend
from tools.browser import ENTER, Browser, find_driver

needs_chromium = pytest.mark.skipif(
    find_driver() is None,
    reason="needs Chromium and its ChromeDriver on the PATH (apt-get install chromium-driver)",
)


def wait_until_ready(browser: Browser) -> Browser:
    """Once the model is known."""
    browser.until("document.querySelector('#model').value === 'tiny'")
    return browser


def ask_question(browser: Browser, question: str) -> None:
    """Send a question, and wait until its answer is over."""
    count = browser.run("return document.querySelectorAll('.theirs').length")
    browser.type("#text", question + ENTER)
    browser.until(f"document.querySelectorAll('.theirs').length > {count}")
    browser.until("!document.querySelector('.live')")


def sent_prompt(backend: FakeBackend) -> str:
    """What the model was asked last, as text."""
    return str(backend.tokenizer.decode(list(backend.requests[-1].prompt_token_ids)))


def release_tokens(server_gate: asyncio.Semaphore, backend: FakeBackend, count: int) -> None:
    """Release ``count`` tokens."""
    assert backend.loop is not None
    for _ in range(count):
        backend.loop.call_soon_threadsafe(server_gate.release)
