"""The chat page in headless Chromium with a scripted backend: rendering and editing."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from molink.errors import Overloaded, Unavailable
from tests.support import tool_templates
from tests.support.chat_page import (
    ask_question,
    needs_chromium,
    release_tokens,
    sent_prompt,
    wait_until_ready,
)
from tests.support.fake_backend import FakeBackend, build_model
from tools.browser import ENTER, Browser

pytestmark = needs_chromium

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


def test_an_answer_is_formatted(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.answer = FORMATTED
    browser = wait_until_ready(page())
    ask_question(browser, "Show it.")
    assert browser.text(".bubble") == "Show it."
    assert browser.text(".theirs strong") == "is"
    assert browser.text(".theirs li") == "first,second"
    assert browser.text(".theirs summary") == "Reasoning"
    assert browser.run("return document.querySelector('.thoughts').open") is False
    assert browser.run("return document.querySelector('.thought').textContent") == (
        "Hm, a *table*."
    )
    cell = "getComputedStyle(document.querySelectorAll('.theirs td')[1]).textAlign"
    assert browser.run(f"return {cell}") == "right"
    browser.until("document.querySelector('.hljs-keyword')?.textContent === 'def'")
    assert browser.text(".code code").strip() == 'def f() -> str:\n    return "<b>"'
    assert "first token in" in browser.text(".note")
    assert "tokens," in browser.text(".note")
    browser.click(".code button")
    browser.until("document.querySelector('.code button.done')")
    assert "think" not in sent_prompt(backend)


def test_reasoning_is_folded_and_not_sent_back(
    page: Callable[..., Browser], tmp_path: Path
) -> None:
    folder = build_model(tmp_path / "tiny", tool_templates.THINKING)
    thinking = FakeBackend(folder, "They *ask*.\n</think>\nYes.")
    browser = wait_until_ready(page(thinking))
    ask_question(browser, "Is it?")
    assert browser.run("return document.querySelector('.thought').textContent") == "They *ask*."
    assert browser.run("return document.querySelector('.thoughts').open") is False
    assert browser.text(".theirs .body").strip() == "Yes."
    ask_question(browser, "Sure?")
    assert "Yes." in sent_prompt(thinking)
    assert "They" not in sent_prompt(thinking)


def test_model_output_is_inert(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.answer = HOSTILE
    browser = wait_until_ready(page())
    browser.click("#open-swarm")
    ask_question(browser, "Do harm.")
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


def test_slow_markdown_is_shown_as_plain_text(page: Callable[..., Browser]) -> None:
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


def test_stop_regenerate_and_edit(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.gate = gate = asyncio.Semaphore(5)
    browser = wait_until_ready(page())
    browser.type("#text", "Count." + ENTER)
    browser.until("document.querySelector('.live .body')?.textContent")
    assert browser.run("return document.querySelector('#send').ariaLabel") == "Stop"
    browser.type("#text", "typed meanwhile")
    release_tokens(gate, backend, 1)
    assert browser.run("return document.activeElement.id") == "text"
    browser.click("#send")
    browser.until("document.querySelector('.note')?.textContent.endsWith('stopped')")
    assert browser.run("return document.querySelector('#text').value") == "typed meanwhile"
    backend.gate = None
    backend.answer = "Second."
    browser.click("[aria-label='Regenerate']")
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
    assert "Count. Slowly." in sent_prompt(backend)
    assert "Second." not in sent_prompt(backend)
    browser.run("document.querySelector('#text').value = ''")
    ask_question(browser, "Go on.")
    assert "Third." in sent_prompt(backend)


def test_errors_are_sentences(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.error = Unavailable("no PC holds layers")
    browser = wait_until_ready(page())
    ask_question(browser, "Hello")
    assert browser.text(".problem span") == ("The swarm is unavailable: no PC holds layers.")
    backend.error = Unavailable("all models are stopped; start one with `molink run MODEL`")
    browser.click(".problem button")
    browser.until("document.querySelector('.problem code')?.textContent === 'molink run MODEL'")
    assert "`" not in browser.text(".problem span")
    assert browser.text(".bubble") == "Hello"
    backend.error = Overloaded("64 requests wait", 5.0)
    browser.click(".problem button")
    browser.until(
        "/The swarm is overloaded: 64 requests wait. .* 5 s/.test(document.body.innerText)"
    )
    backend.error = None
    browser.click(".problem button")
    browser.until("document.querySelector('.theirs .body').textContent.startsWith('Hello there')")
    assert browser.run("return document.querySelector('.theirs .versions').hidden") is True
    backend.error, backend.fail_at = Unavailable("the PC attic is gone"), 3
    ask_question(browser, "And then?")
    assert browser.text(".problem span").endswith("The PC attic is gone.")


def test_a_phone(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.answer = FORMATTED + "\n\n" + "| wide " * 30 + "|\n" + "|--" * 30 + "|\n" + "x" * 300
    browser = wait_until_ready(page())
    browser.emulate(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=1,
        mobile=False,
    )
    ask_question(browser, "Hello")
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


def test_only_one_element_shows_focus(page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    browser.type("#text", "x")
    shown = """[...document.querySelectorAll("*")].filter((one) => {
          const style = getComputedStyle(one);
          return style.outlineStyle === "solid" || style.boxShadow.includes("0px 0px 0px 1px");
        }).length
    """
    assert browser.run(f"return {shown}") == 1
    browser.run("document.querySelector('#send').focus()")
    assert browser.run(f"return {shown}") <= 1
