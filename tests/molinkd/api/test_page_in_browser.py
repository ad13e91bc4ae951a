"""The chat page in a headless Chromium, over a scripted backend."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from molink.errors import Overloaded, Unavailable
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.molinkd.cli.top import swarms
from tests.support import tool_templates
from tests.support.direct_reader import DirectReader
from tests.support.fake_backend import FakeBackend, build_model
from tools.browser import ENTER, ESCAPE, Browser, find_driver

DRIVER = find_driver()
pytestmark = pytest.mark.skipif(
    DRIVER is None,
    reason="needs Chromium and its ChromeDriver on the PATH (apt-get install chromium-driver)",
)

HOSTILE = """\
<img src=x onerror="window.hit=1"><script>window.hit=2</script>
<iframe src="//evil.example"></iframe>

![picture](http://evil.example/p.png) [bad](javascript:window.hit=3) [good](https://good.example/)
[also bad](data:text/html,<script>1</script>) <a href="x" onclick="window.hit=4">raw</a>

```<img/src=x/onerror=window.hit=5>
<svg onload="window.hit=6">
```
"""
FORMATTED = """\
<think>Hm, a *table*.</think>Here it **is**:

| way | tokens/s |
|:--|--:|
| one | 12 |

- first
- second

```python
def f() -> str:
    return "<b>"
```

The end."""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    """One Chromium for all tests of this file."""
    assert DRIVER is not None
    browser = Browser(DRIVER, 1200, 800)
    yield browser
    browser.close()


@pytest.fixture
def page(backend: FakeBackend, window: Browser) -> Iterator[Callable[..., Browser]]:
    """``page(**settings)`` opens the page of a new endpoint, which so has a storage of its own.

    Nothing may violate the page's policy, or fail in it.
    """
    backend.context = 8000
    backend.swarm = swarms.ring(["attic", "<img src=x onerror=window.hit=1>"], model="tiny")
    servers = []

    def open_page(served: FakeBackend = backend, **settings: Any) -> Browser:
        server = EndpointServer(served, ApiSettings(**settings), DirectReader())
        server.start(0)
        servers.append(server)
        window.open(server.url.removesuffix("/v1") + "/")
        return window

    window.emulate("Emulation.clearDeviceMetricsOverride")
    yield open_page
    complaints = [one for one in window.complaints() if "Failed to load resource" not in one]
    window.open("about:blank")
    for server in servers:
        server.stop()
    assert complaints == []


def ready(browser: Browser) -> Browser:
    """Once the model is known."""
    browser.until("document.querySelector('#model').value === 'tiny'")
    return browser


def ask(browser: Browser, question: str) -> None:
    """Send a question, and wait until its answer is over."""
    count = browser.run("return document.querySelectorAll('.theirs').length")
    browser.type("#text", question + ENTER)
    browser.until(f"document.querySelectorAll('.theirs').length > {count}")
    browser.until("!document.querySelector('.live')")


def prompt(backend: FakeBackend) -> str:
    """What the model was asked last, as text."""
    return str(backend.tokenizer.decode(list(backend.requests[-1].prompt)))


def release(server_gate: asyncio.Semaphore, backend: FakeBackend, count: int) -> None:
    """Let so many tokens out."""
    assert backend.loop is not None
    for _ in range(count):
        backend.loop.call_soon_threadsafe(server_gate.release)


def test_an_answer_is_formatted(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.answer = FORMATTED
    browser = ready(page())
    ask(browser, "Show it.")
    assert browser.text(".bubble") == "Show it."
    assert browser.text(".theirs strong") == "is"
    assert browser.text(".theirs li") == "first,second"
    assert browser.text(".theirs summary") == "Thoughts"
    assert browser.run("return document.querySelector('.thoughts').open") is False
    assert browser.run("return document.querySelector('.thought').textContent") == (
        "Hm, a *table*."
    )
    cell = "getComputedStyle(document.querySelectorAll('.theirs td')[1]).textAlign"
    assert browser.run(f"return {cell}") == "right"
    browser.until("document.querySelector('.hljs-keyword')?.textContent === 'def'")
    assert browser.text(".code code").strip() == 'def f() -> str:\n    return "<b>"'
    assert "first token after" in browser.text(".note")
    assert "tokens," in browser.text(".note")
    browser.click(".code button")
    browser.until("document.querySelector('.code button.done')")
    assert "think" not in prompt(backend)


def test_thoughts_are_folded_and_not_sent_back(
    page: Callable[..., Browser], tmp_path: Path
) -> None:
    folder = build_model(tmp_path / "tiny", tool_templates.THINKING)
    thinking = FakeBackend(folder, "They *ask*.\n</think>\nYes.")
    browser = ready(page(thinking))
    ask(browser, "Is it?")
    assert browser.run("return document.querySelector('.thought').textContent") == "They *ask*."
    assert browser.run("return document.querySelector('.thoughts').open") is False
    assert browser.text(".theirs .body").strip() == "Yes."
    ask(browser, "Sure?")
    assert "Yes." in prompt(thinking)
    assert "They" not in prompt(thinking)


def test_what_a_model_writes_does_nothing(
    backend: FakeBackend, page: Callable[..., Browser]
) -> None:
    backend.answer = HOSTILE
    browser = ready(page())
    browser.click("#open-swarm")
    ask(browser, "Do harm.")
    browser.wait_for("#rings .stages li + li")
    assert "<img src=x onerror=window.hit=1>" in browser.text(".stages")
    assert "<script>window.hit=2</script>" in browser.text(".theirs .body")
    assert browser.run("return window.hit ?? 0") == 0
    found = "#log :is(img, script, iframe, svg:not(.glyph), object, style, link, form, input)"
    assert browser.run(f"return document.querySelectorAll({found!r}).length") == 0
    links = "[...document.querySelectorAll('#log a')].map(a => [a.getAttribute('href'), a.rel])"
    rel = "noopener noreferrer nofollow"
    wanted = [[href, rel] for href in ("http://evil.example/p.png", "https://good.example/")]
    assert [one for one in browser.run(f"return {links}") if one[0]] == wanted
    loaded = "performance.getEntriesByType('resource').map(one => new URL(one.name).origin)"
    origin = browser.run("return location.origin")
    assert set(browser.run(f"return {loaded}")) == {origin}


def test_what_takes_a_parser_long_is_shown_as_it_is(page: Callable[..., Browser]) -> None:
    browser = page()
    shown = browser.run(
        """
        const { MarkdownView } = await import("/page/markdown.js");
        const long = ("*a* " + "b".repeat(400) + "\\n\\n").repeat(60);
        const texts = [">".repeat(20000), "_a_b".repeat(50000), long];
        return texts.map((text) => {
          const node = document.createElement("div"), view = new MarkdownView(node);
          view.show(text, true);
          const raw = node.querySelector(".raw")?.textContent === text;
          return [raw, node.querySelectorAll("em").length];
        });
        """
    )
    assert shown == [[True, 0], [True, 0], [False, 60]]


def test_stop_again_and_edit(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.gate = gate = asyncio.Semaphore(5)
    browser = ready(page())
    browser.type("#text", "Count." + ENTER)
    browser.until("document.querySelector('.live .body')?.textContent")
    assert browser.run("return document.querySelector('#send').ariaLabel") == "Stop"
    browser.type("#text", "typed meanwhile")
    release(gate, backend, 1)
    assert browser.run("return document.activeElement.id") == "text"
    browser.click("#send")
    browser.until("document.querySelector('.note')?.textContent.endsWith('stopped')")
    assert browser.run("return document.querySelector('#text').value") == "typed meanwhile"
    backend.gate = None
    backend.answer = "Second."
    browser.click("[aria-label='Answer anew']")
    browser.until("document.querySelector('.body').textContent.trim() === 'Second.'")
    browser.until("!document.querySelector('.live')")
    assert browser.text(".theirs .versions .small") == "2 / 2"
    browser.click(".theirs [aria-label='Earlier version']")
    browser.until("document.querySelector('.body').textContent.trim() !== 'Second.'")
    browser.click("[aria-label='Edit this message']")
    browser.type(".editor textarea", " Slowly.")
    backend.answer = "Third."
    browser.click(".editor .main")
    browser.until("document.querySelector('.body').textContent.trim() === 'Third.'")
    browser.until("!document.querySelector('.live')")
    assert browser.text(".bubble") == "Count. Slowly."
    assert "Count. Slowly." in prompt(backend)
    assert "Second." not in prompt(backend)
    browser.run("document.querySelector('#text').value = ''")
    ask(browser, "Go on.")
    assert "Third." in prompt(backend)


def test_conversations_and_drafts_outlive_a_reload(
    backend: FakeBackend, page: Callable[..., Browser]
) -> None:
    browser = ready(page())
    ask(browser, "First talk.")
    browser.type("#text", "a draft there")
    browser.click("#fresh")
    browser.type("#text", "a new draft")
    browser.run("location.reload()")
    ready(browser)
    browser.until("document.querySelector('#text').value === 'a new draft'")
    browser.click("#open-list")
    browser.click("#conversations .title")
    assert browser.text(".bubble") == "First talk."
    assert browser.text(".theirs .body") == backend.answer
    assert browser.run("return document.querySelector('#text').value") == "a draft there"
    browser.click("[aria-label='Edit this message']")
    browser.type(".editor textarea", " More")
    browser.run("location.reload()")
    ready(browser)
    browser.click("#conversations .title")
    edited = browser.run("return document.querySelector('.editor textarea').value")
    assert edited == "First talk. More"
    browser.run("document.querySelector('#conversations [aria-label=Delete]').click()")
    browser.click("#confirm-yes")
    browser.until("!document.querySelector('#conversations li')")
    assert browser.run("return Object.keys(localStorage).filter(k => /conv|draft/.test(k))") == [
        "molink.draft.new"
    ]


def test_an_answer_that_a_reload_cuts_off_is_kept(
    backend: FakeBackend, page: Callable[..., Browser]
) -> None:
    backend.gate = asyncio.Semaphore(6)
    browser = ready(page())
    browser.type("#text", "Count." + ENTER)
    browser.until("document.querySelector('.live .body')?.textContent.startsWith('Hello')")
    browser.run("location.reload()")
    ready(browser)
    browser.click("#open-list")
    browser.click("#conversations .title")
    assert browser.text(".theirs .body").startswith("Hello")
    assert browser.text(".note").endswith("not complete: the page was left")
    assert browser.text(".problem") == ""


def test_conversations_are_saved_as_files(page: Callable[..., Browser]) -> None:
    browser = ready(page())
    ask(browser, "What is it?")
    saved = browser.run(
        """
        const tree = await import("/page/tree.js");
        const name = Object.keys(localStorage).find(k => k.includes("conversation"));
        const one = JSON.parse(localStorage[name]);
        return [tree.asMarkdown(one), JSON.parse(tree.asJson(one)).messages];
        """
    )
    answer = browser.text(".theirs .body")
    assert saved[0] == f"# What is it?\n\n## You\n\nWhat is it?\n\n## tiny\n\n{answer}\n"
    assert [(one["role"], one["content"]) for one in saved[1]] == [
        ("user", "What is it?"),
        ("assistant", answer),
    ]


def test_settings_are_sent_and_kept(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = ready(page())
    browser.click("#open-settings")
    values = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "3"}
    for field, value in {**values, "seed": "7"}.items():
        browser.type(f"#{field}", value)
    browser.click("#settings-done")
    browser.run("location.reload()")
    ask(ready(browser), "Hello")
    request = backend.requests[-1]
    assert (request.max_tokens, request.sampling.seed) == (3, 7)
    assert request.sampling.temperature == pytest.approx(0.5)
    assert request.sampling.top_p == pytest.approx(0.9)
    assert "Be brief." in prompt(backend)
    assert "cut at the length limit" in browser.text(".note")


def test_a_wrong_setting_is_not_sent(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = ready(page())
    browser.click("#open-settings")
    browser.type("#temperature", "7")
    assert "Temperature" in browser.text("#settings-wrong")
    browser.click("#settings-done")
    ask(browser, "Hello")
    assert browser.text(".problem") == ""


def test_errors_are_sentences(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.error = Unavailable("no PC holds layers")
    browser = ready(page())
    ask(browser, "Hello")
    assert browser.text(".problem span") == (
        "The swarm can't answer now: no PC holds layers. It may work again in 1 s."
    )
    assert browser.text(".bubble") == "Hello"
    backend.error = Overloaded("64 requests wait", 5.0)
    browser.click(".problem button")
    browser.until("/places are taken: 64 requests wait. .* 5 s/.test(document.body.innerText)")
    backend.error = None
    browser.click(".problem button")
    browser.until("document.querySelector('.theirs .body').textContent.startsWith('Hello there')")
    assert browser.run("return document.querySelector('.theirs .versions').hidden") is True
    backend.error, backend.fail_at = Unavailable("the PC attic is gone"), 3
    ask(browser, "And then?")
    assert browser.text(".problem span").endswith("The PC attic is gone.")


def test_the_key_is_asked_for(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = page(api_key="sécret")
    browser.until("document.querySelector('#ask').open")
    browser.type("#ask-key", "wrong" + ENTER)
    browser.until("document.querySelector('#ask').open")
    browser.type("#ask-key", "sécret" + ENTER)
    ask(ready(browser), "Hello")
    assert browser.text(".theirs .body") == backend.answer
    browser.run("location.reload()")
    ready(browser)


def test_the_swarm_is_drawn(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.swarm["coordinator"] = {"state": "running", "addresses": ["192.168.1.7:5466"]}
    backend.swarm["knocks"] = [{"name": "new"}]
    browser = ready(page())
    browser.click("#open-swarm")
    browser.until("document.querySelectorAll('.ring .stage').length === 2")
    assert "attic · layers 1 to 12" in browser.text("#rings .stages")
    assert browser.run("return document.querySelector('.ring .rate').textContent") == "21.4"
    assert "2 answers run, 1 waits" in browser.text("#rings")
    assert "molink join 192.168.1.7" in browser.text("#join-commands code")
    assert "molink approve" in browser.text("#knocks")
    backend.swarm = swarms.ring(["attic"], model="tiny", ready=False, reason="cellar is away")
    browser.until("document.querySelectorAll('.ring .stage').length === 1")
    assert "cellar is away" in browser.text("#rings")


def test_it_is_said_why_one_waits(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.gate = gate = asyncio.Semaphore(0)
    browser = ready(page())
    browser.type("#text", "Hello" + ENTER)
    said = "document.querySelector('.theirs .note')?.textContent"
    browser.until(f"/2 answers run|read the 1000 tokens/.test({said})")
    release(gate, backend, 100)
    browser.until("!document.querySelector('.live')")


def test_models_follow_the_swarm(
    backend: FakeBackend, page: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = backend.models()
    monkeypatch.setattr(backend, "models", list)
    browser = page()
    browser.until("document.querySelector('#model').textContent === 'no model yet'")
    browser.click("#open-swarm")
    monkeypatch.setattr(backend, "models", lambda: served)
    backend.swarm = swarms.ring(["attic"], model="another")
    ready(browser)


def test_a_phone(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.answer = FORMATTED + "\n\n" + "| wide " * 30 + "|\n" + "|--" * 30 + "|\n" + "x" * 300
    browser = ready(page())
    browser.emulate(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=1,
        mobile=False,
    )
    ask(browser, "Hello")
    wide = "document.documentElement.scrollWidth"
    for panel in ("list", "swarm"):
        browser.click(f"#open-{panel}")
        assert browser.run(f"return {wide}") <= 360
        assert browser.run("return document.querySelector('main').inert") is True
        browser.run("document.activeElement.blur()")
        browser.emulate("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
        browser.until(f"document.querySelector('#{panel}').hidden")
    scroll = "document.querySelector('#scroll')"
    assert browser.run(f"return {scroll}.scrollWidth - {scroll}.clientWidth") <= 0


def test_only_one_thing_shows_the_focus(page: Callable[..., Browser]) -> None:
    browser = ready(page())
    browser.type("#text", "x")
    shown = """[...document.querySelectorAll("*")].filter((one) => {
          const style = getComputedStyle(one);
          return style.outlineStyle === "solid" || style.boxShadow.includes("0px 0px 0px 1px");
        }).length
    """
    assert browser.run(f"return {shown}") == 1
    browser.run("document.querySelector('#send').focus()")
    assert browser.run(f"return {shown}") <= 1


def test_what_is_kept_is_bounded(page: Callable[..., Browser]) -> None:
    browser = page()
    kept = browser.run(
        """
        const { Store } = await import("/page/store.js");
        const { add } = await import("/page/tree.js");
        const bound = 50000, held = new Map();
        const used = () => [...held.values()].reduce((sum, text) => sum + text.length, 0);
        const storage = new Proxy({
          getItem: (name) => held.get(name) ?? null,
          removeItem: (name) => held.delete(name),
          setItem: (name, text) => {
            const before = held.get(name)?.length ?? 0;
            if (used() - before + text.length > bound) throw new Error("full");
            held.set(name, text);
          },
        }, {
          ownKeys: () => [...held.keys()],
          getOwnPropertyDescriptor: () => ({ enumerable: true, configurable: true }),
        });
        const store = new Store(storage);
        for (let i = 0; i < 20; i++) {
          const one = store.create();
          add(one, null, { role: "user", content: `${i} ` + "x".repeat(10000) });
          one.updated = i;
          store.save(one);
        }
        const titles = (from) => from.sorted().map((one) => Number(one.title.split(" ")[0]));
        held.set("molink.conversation.broken", '{"id": "broken", "nodes": 5}');
        return [titles(store), titles(new Store(storage)), used() <= bound + 100];
        """
    )
    assert kept == [[19, 18, 17, 16], [19, 18, 17, 16], True]


@pytest.mark.slow
def test_accessibility(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    """By axe-core: ``npm pack axe-core``, unpack it, and name its ``axe.min.js`` in ``AXE``."""
    if "AXE" not in os.environ:
        pytest.skip("name a copy of axe-core (npm) in AXE: its axe.min.js")
    axe = Path(os.environ["AXE"]).read_text(encoding="utf-8")
    backend.answer = FORMATTED
    browser = ready(page())
    ask(browser, "Show it.")
    faults = []
    for scheme in ("light", "dark"):
        browser.run("document.documentElement.dataset.theme = arguments[0]", scheme)
        for opened in ("", "#open-list", "#open-swarm", "#open-settings"):
            if opened:
                browser.click(opened)
            browser.run(axe)
            result = browser.run("return await axe.run()")
            assert len(result["passes"]) > 10
            found = result["violations"]
            faults += [
                (scheme, opened, one["id"], one["help"], one["nodes"][0]["html"][:100])
                for one in found
            ]
            if opened:
                browser.type("body", ESCAPE)
                browser.run(
                    "if (!document.querySelector('#settings').open)"
                    " document.querySelector(arguments[0]).click()",
                    opened,
                )
                browser.run("document.querySelector('#settings').close()")
    assert faults == []
