"""The page in other languages: catalogues have every text, and the browser's language is used."""

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.chat_page import ask_question, needs_chromium
from tests.support.fake_administration import TOKEN
from tests.support.fake_backend import FakeBackend
from tools.browser import Browser

FOLDER = Path(str(files("molink"))) / "data" / "page"
LANGUAGES = {path.stem: path for path in sorted((FOLDER / "lang").glob("*.js"))}
#: Texts that the page translates but no call of ``t`` contains: most come from the endpoint.
OTHERS = {"standby", "endpoint only", "offline", "incomplete: the page was closed"}
#: Texts that are the same in every language.
NAMES = {"molink"}
_CALL = re.compile(r'\bt\(\s*("(?:[^"\\]|\\.)*")')
_ENTRY = re.compile(r'^  ("(?:[^"\\]|\\.)*"): ("(?:[^"\\]|\\.)*"),$', re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{\w+\}|`[^`]*`")
_VOID = {"br", "img", "input", "link", "meta"}


class Texts(HTMLParser):
    """Collects the texts of a page as ``readTexts`` of language.js does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        #: Open elements with their children; a child is (element, "") or ("", text).
        self._open: list[tuple[str, list[tuple[str, str]]]] = [("", [])]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = ("aria-label", "placeholder", "title")
        self.found |= {value for name, value in attrs if name in named and value}
        self._open[-1][1].append((tag, ""))
        if tag not in _VOID:
            self._open.append((tag, []))

    def handle_data(self, data: str) -> None:
        self._open[-1][1].append(("", data))

    def handle_endtag(self, tag: str) -> None:
        opened, children = self._open.pop()
        assert opened == tag
        if tag in ("code", "kbd"):
            self._open[-1][1][-1] = tag, "".join(text for _, text in children)
        elif any(kind == "code" for kind, _ in children):
            sentence = "".join(f"`{text}`" if kind else text for kind, text in children)
            self.found.add(" ".join(sentence.split()))
        else:
            texts = (" ".join(text.split()) for kind, text in children if not kind)
            self.found |= {text for text in texts if re.search(r"[^\W\d_]", text)}


def page_texts() -> set[str]:
    """Every English text of the page."""
    page = Texts()
    page.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    scripts = (path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js"))
    called = {json.loads(text) for script in scripts for text in _CALL.findall(script)}
    return page.found - NAMES | called | OTHERS


def catalogue(path: Path) -> dict[str, str]:
    entries = _ENTRY.findall(path.read_text(encoding="utf-8"))
    return {json.loads(text): json.loads(translated) for text, translated in entries}


def test_there_is_german_and_chinese() -> None:
    assert LANGUAGES.keys() == {"de", "zh"}
    listed = re.search(r"CATALOGUES = (\[.*?\])", (FOLDER / "language.js").read_text("utf-8"))
    assert listed is not None
    assert json.loads(listed[1]) == [*LANGUAGES]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_catalogue_has_every_text_and_no_other(language: str) -> None:
    found = catalogue(LANGUAGES[language])
    assert page_texts() - found.keys() == set(), "no translation"
    assert found.keys() - page_texts() == set(), "not in the page any more"
    assert all(found.values())
    lines = LANGUAGES[language].read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith('  "') for line in lines) == len(found)


@pytest.mark.parametrize("language", LANGUAGES)
def test_placeholders_and_commands_agree(language: str) -> None:
    for text, translated in catalogue(LANGUAGES[language]).items():
        wanted = sorted(_PLACEHOLDER.findall(text))
        assert sorted(_PLACEHOLDER.findall(translated)) == wanted, text


@pytest.fixture
def speak(page: Callable[..., Browser]) -> Iterator[Callable[[str], Browser]]:
    """``speak(language)``: the page in a browser of that language, opened by the owner."""
    shown: list[Browser] = []

    def open_page(language: str) -> Browser:
        browser = page()
        shown.append(browser)
        origin = browser.run("return location.origin")
        browser.open("about:blank")
        _set_language(browser, language)
        browser.open(f"{origin}/#owner={TOKEN}")
        browser.wait_for("#model-list .item")
        return browser

    yield open_page
    for browser in shown:
        _set_language(browser, "en-US")


def _set_language(browser: Browser, languages: str) -> None:
    agent = browser.run("return navigator.userAgent")
    browser.emulate("Network.setUserAgentOverride", userAgent=agent, acceptLanguage=languages)


@needs_chromium
def test_other_languages_get_english(page: Callable[..., Browser]) -> None:
    wanted = [["de-AT", "en"], ["zh"], ["zh-Hans-CN"], ["zh-TW", "zh"], ["fr", "de"], []]
    chosen = page().run(
        """
        const { chooseLanguage } = await import("/page/language.js");
        return arguments[0].map(chooseLanguage);
        """,
        wanted,
    )
    assert chosen == ["de", "zh", "zh", "en", "en", "en"]


@needs_chromium
@pytest.mark.parametrize(
    ("wanted", "language", "words"),
    [
        ("de-AT,de,en", "de", ("PCs, die beitreten möchten", "Dieser Schwarm", "vor 20 s", "12,0")),
        ("zh-CN,zh", "zh", ("请求加入的电脑", "此集群", "20 s前", "12.0")),
    ],
)
def test_the_page_speaks_the_browsers_language(
    backend: FakeBackend,
    speak: Callable[[str], Browser],
    wanted: str,
    language: str,
    words: tuple[str, str, str, str],
) -> None:
    backend.swarm |= {
        "models": [{"name": "molink-demo", "ready": 1}],
        "pairing_requests": [{"name": "new", "code": "4827-1931", "address": "192.168.1.9"}],
    }
    browser = speak(wanted)
    assert browser.run("return document.documentElement.lang") == language
    assert browser.text("#waiting-title") == words[0]
    assert words[2] in browser.text("#event-list")
    assert f"{words[3]} GB" in browser.text("#pc-list")
    browser.click("#close-manage")
    browser.wait_for(".offers li")
    assert words[1] in browser.text(".hello")
    ask_question(browser, "Hello")
    browser.click("#open-settings")
    shown = browser.run("return document.body.innerText")
    assert "Temperatur" in shown or "温度" in shown
    assert not re.search(r"\b(?:Settings|Temperature|Sampling of|first token|New chat)\b", shown)
    browser.click("#settings-done")
    browser.emulate(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=1,
        mobile=False,
    )
    assert browser.run("return document.documentElement.scrollWidth") <= 360
