"""The page's chats in headless Chromium: names, search, settings, prompts, formulas, files."""

import json
from collections.abc import Callable
from typing import Any

from tests.support.chat_page import ask_question, needs_chromium, sent_prompt, wait_until_ready
from tests.support.fake_backend import FakeBackend
from tools.browser import ENTER, ESCAPE, Browser

pytestmark = needs_chromium

FORMULAS = r"""Inline $x^2$, \(y_1\) and $$\frac{a}{b}$$; not $5 and $10, nor `$z$`.

\[ \sum_{i=1}^n i
- 1 \]

Hostile: $\href{javascript:window.hit=1}{x}$ $\includegraphics{http://evil.example/x}$ $\oops{1}$
"""


def titles(browser: Browser) -> str:
    return browser.text("#conversations .title")


def test_rename_and_search(page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    browser.click("#open-list")
    ask_question(browser, "About foxes")
    browser.click("#fresh")
    ask_question(browser, "About cows")
    browser.run("document.querySelector('#conversations [aria-label=Rename]').click()")
    browser.type("#conversations li input", ESCAPE)
    browser.run("document.querySelector('#conversations [aria-label=Rename]').click()")
    browser.run("document.querySelector('#conversations li input').value = ''")
    browser.type("#conversations li input", "Cattle" + ENTER)
    assert titles(browser) == "Cattle,About foxes"
    assert browser.run("return document.title") == "Cattle · molink"
    browser.type("#find-chat", "cows world")  # one match in a question, one in an answer
    assert titles(browser) == "Cattle"
    browser.type("#find-chat", " zebra")
    assert titles(browser) == ""
    assert "has these words" in browser.text("#storage-state")
    browser.run("location.reload()")
    wait_until_ready(browser)
    browser.until("document.querySelector('#conversations .title')?.textContent === 'Cattle'")


def test_a_cut_answer_continues(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    browser.click("#open-settings")
    browser.type("#max_tokens", "3")
    browser.click("#settings-done")
    ask_question(browser, "Count.")
    cut = browser.text(".theirs .body").strip()
    assert backend.answer.startswith(cut)
    assert "stopped at the length limit" in browser.text(".note")
    browser.run("document.querySelectorAll('.theirs .tools .plain')[0].click()")
    browser.until("!document.querySelector('.live') && document.querySelector('.note').textContent")
    assert browser.text(".theirs .body").strip() != cut
    assert "Continue exactly where your answer stops" in sent_prompt(backend)
    assert cut in sent_prompt(backend)
    assert " of 8,000 tokens of context used" in browser.text("#context")


def test_settings_of_one_chat(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())

    def fill(scope: str, **fields: Any) -> None:
        browser.click("#open-settings")
        browser.run(
            "const scope = document.querySelector('#scope'); scope.value = arguments[0];"
            "scope.dispatchEvent(new Event('change'))",
            scope,
        )
        for name, text in fields.items():
            browser.type(f"#{name}", str(text))
        browser.click("#settings-done")

    fill("all", temperature=0.5, top_k=7)
    fill("this", temperature=0.25, stop="END", system="Be brief.")
    ask_question(browser, "One")
    sampling = backend.requests[-1].sampling_params
    assert (sampling.temperature, sampling.top_k) == (0.25, 7)
    assert "Be brief." in sent_prompt(backend)
    browser.click("#fresh")
    ask_question(browser, "Two")
    assert backend.requests[-1].sampling_params.temperature == 0.5
    assert "Be brief." not in sent_prompt(backend)


def test_saved_prompts(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    browser.type("#text", "Summarize this:")
    browser.click("#open-prompts")
    browser.type("#prompt-name", "sum" + ENTER)
    browser.wait_for("[aria-label='Insert: sum']")
    browser.run("document.querySelector('#text').value = ''")
    browser.click("[aria-label='Insert: sum']")
    assert browser.run("return document.querySelector('#text').value") == "Summarize this:"
    browser.click("#open-prompts")
    browser.click("[aria-label='As system prompt: sum']")
    ask_question(browser, " foxes")
    assert sent_prompt(backend).startswith("system\nSummarize this:\n")
    browser.click("#open-prompts")
    browser.click("[aria-label='Delete sum']")
    assert "None yet" in browser.text("#prompt-list")
    browser.click("#prompts-done")


def test_formulas(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.answer = FORMULAS
    browser = wait_until_ready(page())
    ask_question(browser, "Show it.")
    browser.until("document.querySelectorAll('.theirs math').length === 4")
    assert browser.run("return document.querySelector('.theirs mfrac').textContent") == "ab"
    assert browser.run("return document.querySelectorAll('.theirs math[display]').length") == 2
    shown = browser.text(".theirs .body")
    for text in ("not $5 and $10", "$z$", r"\href{javascript:", r"\oops{1}"):
        assert text in shown
    outside = "#log :is(img, script, a, [style])"
    assert browser.run(f"return document.querySelectorAll({outside!r}).length") == 0


def test_formulas_have_a_time_limit(page: Callable[..., Browser]) -> None:
    browser = page()
    shown = browser.run(
        """
        const { formulas, renderFormulas } = await import("/page/math.js");
        const texts = ["{".repeat(3999), "$a$", "x".repeat(5000)];
        const box = document.createElement("div");
        box.append(...texts.map((text) => {
          const node = document.createElement("span");
          node.className = "formula";
          node.textContent = `$${text}$`;
          return node;
        }));
        await renderFormulas(box, { left: 0 });
        const before = box.querySelectorAll("math").length;
        const budget = { left: 60000 };
        await renderFormulas(box, budget);
        const found = (text) => formulas.extensions[0].tokenizer(text) !== undefined;
        return [before, budget.left < 60000, found("$" + "x".repeat(5000) + "$"), found("$x$")];
        """
    )
    assert shown == [0, True, False, True]


def test_export_and_import(page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    browser.click("#open-list")
    ask_question(browser, "What is it?")
    browser.run("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }")
    browser.click("#save-all")
    (saved,) = json.loads(browser.run("return window.saved.text()"))
    other = {"title": "Of another program", "messages": [{"role": "user", "content": "Hi"}]}
    loop = {"id": "x", "title": "", "updated": 1, "leaf": "a"}
    node = {"role": "user", "content": "x"}
    nodes = {"a": {**node, "id": "a", "parent": "b"}, "b": {**node, "id": "b", "parent": "a"}}
    hand_over = """
        const field = document.querySelector('#import-file'), files = new DataTransfer();
        files.items.add(new File([arguments[0]], "talks.json"));
        field.files = files.files;
        field.dispatchEvent(new Event('change'));
    """
    browser.run(hand_over, json.dumps([saved, other]))
    browser.until("document.querySelector('#import-state').textContent === '2 imported.'")
    assert sorted(titles(browser).split(",")) == ["Of another program", *["What is it?"] * 2]
    for broken in ("[", "{}", json.dumps({"tree": {**loop, "nodes": nodes}})):
        browser.run(hand_over, broken)
        browser.until(
            "document.querySelector('#import-state').textContent.includes('no conversations')"
        )
    assert browser.run("return document.querySelectorAll('#conversations .title').length") == 3


def test_the_keyboard(page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    ask_question(browser, "First")

    def press(key: str, *, shift: bool = False) -> None:
        pressed = {"key": key, "ctrlKey": True, "shiftKey": shift, "bubbles": True}
        browser.run(
            "document.body.dispatchEvent(new KeyboardEvent('keydown', arguments[0]))", pressed
        )

    browser.type("#text", "\ue013")  # arrow up
    assert browser.run("return document.activeElement.value") == "First"
    browser.type(".editor textarea", ESCAPE)
    press("k")
    assert browser.run("return document.activeElement.id") == "find-chat"
    press("M", shift=True)
    assert browser.run("return location.hash") == "#swarm"
    press("M", shift=True)
    assert browser.run("return document.querySelector('#manage').hidden") is True
    press(",")
    assert browser.run("return document.querySelector('#settings').open") is True
    browser.click("#settings-done")
    press("O", shift=True)
    assert browser.run("return document.querySelectorAll('.bubble').length") == 0
