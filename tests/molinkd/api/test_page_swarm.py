"""The page's view of the swarm in headless Chromium: the owner's actions, and what others see."""

from collections.abc import Callable

import pytest

from molink.errors import Unavailable
from molinkd.api.administration import LocalModel
from tests.molinkd.cli.top import swarms
from tests.support.chat_page import needs_chromium, wait_until_ready
from tests.support.fake_administration import TOKEN, FakeAdministration
from tests.support.fake_backend import FakeBackend
from tools.browser import Browser

pytestmark = needs_chromium

OWNER = f"#owner={TOKEN}"


@pytest.fixture
def swarm(page: Callable[..., Browser], backend: FakeBackend) -> FakeBackend:
    """A swarm of two PCs that serves one model; a third PC wants to join."""
    backend.swarm |= {
        "models": [{"name": "tiny", "ready": 1}],
        "pairing_requests": [{"name": "<b>new", "code": "4827-1931", "address": "192.168.1.9"}],
    }
    coming = {"model": "big", "bytes": 340 * 10**6, "total": 10**9, "rate": 10**7}
    backend.swarm["peers"][0]["transfers"] = [coming]  # type: ignore[index]
    return backend


def done(browser: Browser, administration: FakeAdministration, count: int) -> tuple[object, ...]:
    """Wait for the page's next action, which must be number ``count``, and return it."""
    browser.until("document.querySelector('#announcement').textContent !== ''")
    assert len(administration.done) == count, administration.done
    browser.run("document.querySelector('#announcement').textContent = ''")
    return administration.done[-1]


def test_the_owner_manages_the_swarm(
    swarm: FakeBackend, page: Callable[..., Browser], administration: FakeAdministration
) -> None:
    administration.local = (LocalModel("mine", 5_000_000, source="/models/mine"),)
    browser = wait_until_ready(page(at=OWNER))
    browser.wait_for("#waiting-list .card")
    assert browser.run("return location.hash") == "#swarm"
    assert TOKEN not in browser.run("return JSON.stringify({ ...localStorage }) + location.href")
    assert browser.text("#pc-list h4") == "attic (this PC),<img src=x onerror=window.hit=1>"
    assert "3.0 GB of weights and 1.0 GB for conversations, of 12.0 GB" in browser.text("#pc-list")
    assert "tiny: layers 1–12 · busy 34\N{NO-BREAK SPACE}%" in browser.text("#pc-list")
    assert browser.text("#transfer-list") == "attic fetches big: 340 MB of 1.0 GB, 10.0 MB/s"
    assert "20 s ago: attic is offline" in browser.text("#event-list")
    # Approval compares the typed code with the codes of waiting PCs.
    browser.type("#waiting-list input", "1111-2222")
    browser.click("#waiting-list .main")
    browser.until("document.querySelector('#waiting-list .wrong').textContent.includes('attacker')")
    assert administration.done == []
    browser.run("document.querySelector('#waiting-list input').value = ''")
    browser.type("#waiting-list input", "48271931\n")
    assert done(browser, administration, 1) == ("approve", "4827-1931")
    browser.click("#waiting-list .plain")
    assert done(browser, administration, 2) == ("refuse", "4827-1931")
    browser.click("#pc-list .plain:not([hidden])")
    assert done(browser, administration, 3) == ("drain", True)
    # Models.
    browser.click("#served-list .plain")
    browser.click("#confirm-yes")
    assert done(browser, administration, 4) == ("stop", "tiny")
    browser.wait_for("#model-list .item")
    browser.click("[aria-label='Serve mine']")
    assert "in place of tiny" in browser.text("#confirm-text")
    browser.click("#confirm-yes")
    assert done(browser, administration, 5) == ("serve", "/models/mine")
    assert "The swarm loads /models/mine" in browser.text("#jobs")
    ring = swarm.swarm["pipelines"][0]  # type: ignore[index]
    ring["model"] = "/models/mine"
    browser.until("document.querySelector('#jobs').textContent === ''")
    ring["model"] = "tiny"
    browser.until("document.querySelector('#served-list').textContent.includes('ready')")
    browser.type("#model-search", "owner/name")
    browser.click("[aria-label='Download owner/name to this PC']")
    assert done(browser, administration, 6) == ("pull", "owner/name")
    browser.type("#setting-list input", "18:00-23:30\ue004")  # the field is left by Tab
    assert done(browser, administration, 7) == ("set", "pause_times", "18:00-23:30")
    administration.error = Unavailable("the hub is gone")
    browser.click("[aria-label='Serve owner/name']")
    browser.click("#confirm-yes")
    browser.until("document.querySelector('#jobs .wrong')?.textContent.includes('The hub is gone')")
    browser.click("#close-manage")
    browser.until("!document.querySelector('main').hidden")
    assert browser.run("return window.hit ?? 0") == 0


def test_others_see_the_swarm_and_change_nothing(
    swarm: FakeBackend, page: Callable[..., Browser]
) -> None:
    browser = wait_until_ready(page())
    browser.click("#open-swarm")
    browser.click("#open-manage")
    browser.wait_for("#pc-list .card")
    assert "molink page" in browser.text("#owner-note")
    assert browser.text("#served-list strong") == "tiny"
    shown = (
        "[...document.querySelectorAll('#manage button')].filter((one) => one.checkVisibility())"
    )
    assert browser.run(f"return {shown}.map((one) => one.textContent)") == ["Back to chat"]
    assert "4827" not in browser.run("return document.body.textContent")
    browser.run("history.back()")
    browser.until("!document.querySelector('main').hidden")


def test_a_token_of_an_earlier_start_is_dropped(
    swarm: FakeBackend, page: Callable[..., Browser]
) -> None:
    browser = page(at="#owner=abcdefghijklmnopqrstuvwxyz", api_key="k")
    browser.until("document.querySelector('#ask').open")
    browser.type("#ask-key", "k\n")
    wait_until_ready(browser)
    browser.until("document.querySelector('#owner-note').textContent.includes('molink page')")


def test_a_first_start_offers_models_that_fit(
    page: Callable[..., Browser], backend: FakeBackend, administration: FakeAdministration
) -> None:
    card = {"kind": "cuda", "name": "Card", "memory": 12 * swarms.GB, "read_rate": 400e9}
    backend.swarm = {"peers": [swarms.peer(0, "attic", stage="auto", capacity=card)]}
    browser = page(at=OWNER)
    browser.wait_for("#pc-list .card")
    browser.click("#close-manage")
    browser.wait_for(".offers button")
    assert browser.run("return document.querySelectorAll('.offers button').length") == 3
    assert "tokens/s" in browser.text(".offers")
    name = browser.text(".offers li:first-child strong")
    browser.click(".offers button")
    browser.until("document.querySelector('#jobs')?.textContent.includes('The swarm loads')")
    assert administration.done == [("serve", name)]
