"""The chat page in headless Chromium: storage, settings, and the swarm panel."""

import asyncio
from collections.abc import Callable

import pytest

from tests.molinkd.cli.top import swarms
from tests.support.chat_page import (
    ask_question,
    needs_chromium,
    release_tokens,
    sent_prompt,
    wait_until_ready,
)
from tests.support.fake_backend import FakeBackend
from tools.browser import ENTER, ESCAPE, Browser

pytestmark = needs_chromium


def test_conversations_and_drafts_survive_a_reload(
    backend: FakeBackend, page: Callable[..., Browser]
) -> None:
    browser = wait_until_ready(page())
    ask_question(browser, "First talk.")
    browser.type("#text", "a draft there")
    browser.click("#fresh")
    browser.type("#text", "a new draft")
    browser.run("location.reload()")
    wait_until_ready(browser)
    browser.until("document.querySelector('#text').value === 'a new draft'")
    browser.click("#open-list")
    browser.click("#conversations .title")
    assert browser.text(".bubble") == "First talk."
    assert browser.text(".theirs .body") == backend.answer
    assert browser.run("return document.querySelector('#text').value") == "a draft there"
    browser.click("[aria-label='Edit this message']")
    browser.type(".editor textarea", " More")
    browser.run("location.reload()")
    wait_until_ready(browser)
    browser.wait_for(".editor textarea")
    edited = browser.run("return document.querySelector('.editor textarea').value")
    assert edited == "First talk. More"
    browser.run("document.querySelector('#conversations [aria-label=Delete]').click()")
    browser.click("#confirm-yes")
    browser.until("!document.querySelector('#conversations li')")
    assert browser.run("return Object.keys(localStorage).filter(k => /conv|draft/.test(k))") == [
        "molink.draft.new"
    ]


def test_each_chat_has_an_address(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    ask_question(browser, "First talk.")
    browser.click("#fresh")
    assert browser.text(".bubble") == ""
    ask_question(browser, "Second talk.")
    second = browser.run("return location.href")
    browser.run("history.back()")
    browser.until("document.querySelector('.bubble')?.textContent === 'First talk.'")
    assert browser.run("return document.title") == "First talk. · molink"
    browser.open(second)
    browser.until("document.querySelector('.bubble')?.textContent === 'Second talk.'")
    browser.run("location.reload()")
    wait_until_ready(browser)
    browser.until("document.querySelector('.bubble')?.textContent === 'Second talk.'")
    browser.run("location.hash = '#chat/unknown'")
    browser.until("document.querySelector('.bubble') === null")
    assert browser.run("return location.hash") == ""


def test_an_answer_interrupted_by_a_reload_is_kept(
    backend: FakeBackend, page: Callable[..., Browser]
) -> None:
    backend.gate = asyncio.Semaphore(6)
    browser = wait_until_ready(page())
    browser.type("#text", "Count." + ENTER)
    browser.until("document.querySelector('.live .body')?.textContent.startsWith('Hello')")
    browser.run("location.reload()")
    wait_until_ready(browser)
    browser.until("document.querySelector('.theirs .body')?.textContent.startsWith('Hello')")
    assert browser.text(".note").endswith("incomplete: the page was closed")
    assert browser.text(".problem span") == ""


def test_conversations_are_saved_as_files(page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    ask_question(browser, "What is it?")
    browser.click("#open-list")
    assert browser.text("#save-as button") == "Markdown,JSON"
    browser.run("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }")
    browser.run("document.querySelector('#save-as button').click()")
    assert "## You" in browser.run("return window.saved.text()")
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


def test_storage_is_bounded(page: Callable[..., Browser]) -> None:
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


def test_settings_are_sent_and_kept(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    browser.click("#open-settings")
    values = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "3"}
    for field, value in {**values, "seed": "7"}.items():
        browser.type(f"#{field}", value)
    browser.click("#settings-done")
    browser.run("location.reload()")
    ask_question(wait_until_ready(browser), "Hello")
    request = backend.requests[-1]
    assert (request.max_tokens, request.sampling_params.seed) == (3, 7)
    assert request.sampling_params.temperature == pytest.approx(0.5)
    assert request.sampling_params.top_p == pytest.approx(0.9)
    assert "Be brief." in sent_prompt(backend)
    assert "stopped at the length limit" in browser.text(".note")


def test_an_invalid_setting_is_named_and_not_sent(page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    browser.click("#open-settings")
    browser.type("#temperature", "7")
    assert "Temperature" in browser.text("#settings-wrong")
    browser.click("#settings-done")
    assert browser.run("return document.querySelector('#settings').open") is True
    assert browser.run("return document.activeElement.id") == "temperature"
    browser.type("#temperature", ESCAPE)
    ask_question(browser, "Hello")
    assert browser.text(".problem span") == ""
    browser.click("#open-settings")
    assert browser.run("return document.querySelector('#temperature').value") == ""
    assert browser.text("#settings-wrong") == ""
    browser.click("#settings-done")


def test_a_wrong_key_is_refused_in_the_settings(page: Callable[..., Browser]) -> None:
    browser = page(api_key="right")
    browser.until("document.querySelector('#ask').open")
    browser.click("#ask-later")
    browser.click("#open-settings")
    browser.type("#key", "wrong")
    browser.click("#settings-done")
    browser.until("/refuses/.test(document.querySelector('#settings-wrong').textContent)")
    browser.run("document.querySelector('#key').value = 'right'")
    browser.click("#settings-done")
    browser.until("!document.querySelector('#settings').open")
    wait_until_ready(browser)


def test_the_key_is_asked_for(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = page(api_key="sécret")
    browser.until("document.querySelector('#ask').open")
    browser.type("#ask-key", "wrong" + ENTER)
    browser.until("/refuses/.test(document.querySelector('#ask-wrong').textContent)")
    assert browser.run("return document.querySelector('#ask').open") is True
    browser.type("#ask-key", "sécret" + ENTER)
    ask_question(wait_until_ready(browser), "Hello")
    assert browser.text(".theirs .body") == backend.answer
    browser.run("location.reload()")
    wait_until_ready(browser)


def test_the_swarm_is_drawn(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.swarm["coordinator"] = {"state": "running", "addresses": ["192.168.1.7:5466"]}
    backend.swarm["pairing_requests"] = [{"name": "new"}]
    browser = wait_until_ready(page())
    browser.click("#open-swarm")
    browser.until("document.querySelectorAll('.ring .stage').length === 2")
    assert "attic · layers 1–12" in browser.text("#rings .stages")
    assert browser.run("return document.querySelector('.ring .rate').textContent") == "21.4"
    assert "2 running, 1 waiting" in browser.text("#rings")
    assert "molink join 192.168.1.7" in browser.text("#join-commands code")
    assert "molink approve" in browser.text("#pairings code")
    assert "busy" in browser.text("#rings .stages")
    backend.swarm = swarms.ring(["attic"], model="tiny", ready=False, reason="cellar is offline")
    browser.until("document.querySelectorAll('.ring .stage').length === 1")
    assert "cellar is offline" in browser.text("#rings")
    backend.swarm = swarms.ring(["attic"], model="tiny")
    backend.swarm["pipelines"][0]["scheduler"]["running"] = 0
    browser.until("/^Idle/.test(document.querySelector('#rings p').textContent)")
    assert "busy" not in browser.text("#rings .stages")


def test_waiting_is_explained(backend: FakeBackend, page: Callable[..., Browser]) -> None:
    backend.gate = gate = asyncio.Semaphore(0)
    browser = wait_until_ready(page())
    browser.type("#text", "Hello" + ENTER)
    state = "document.querySelector('.theirs .note')?.textContent"
    browser.until(f"/^Waiting for|^Processing|^Queued/.test({state})")
    release_tokens(gate, backend, 100)
    browser.until("!document.querySelector('.live')")
    why = browser.run(
        """
        const { whyWaiting } = await import("/page/swarm.js");
        const summary = await (await fetch("/swarm")).json();
        const after = (elapsed) => whyWaiting(summary, "tiny", elapsed);
        const found = [after(3), after(1), after(60), whyWaiting(summary, "other", 1)];
        summary.rings[0].ready = false;
        summary.rings[0].reason = "attic is offline";
        return [...found, after(1)];
        """
    )
    assert why == [
        "Processing 1000 prompt tokens: 10\N{NO-BREAK SPACE}%…",
        "Queued: 2 running, 0 ahead of this request…",
        "Waiting for the first token…",
        "The swarm is not ready. The request is queued…",
        "The swarm is not ready: attic is offline. The request is queued…",
    ]


def test_models_follow_the_swarm(
    backend: FakeBackend, page: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = backend.list_models()
    monkeypatch.setattr(backend, "list_models", list)
    browser = page()
    browser.until("document.querySelector('#model').textContent === 'No model served'")
    browser.click("#open-swarm")
    monkeypatch.setattr(backend, "list_models", lambda: served)
    backend.swarm = swarms.ring(["attic"], model="another")
    wait_until_ready(browser)
