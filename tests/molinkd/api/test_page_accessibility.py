"""The page by the rules of WCAG 2.2 AA, as axe-core checks them, and by the keyboard alone."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.chat_page import ask_question, needs_chromium, wait_until_ready
from tests.support.fake_administration import TOKEN, FakeAdministration
from tests.support.fake_backend import FakeBackend
from tools.browser import Browser

pytestmark = needs_chromium

#: axe-core 4.14.1 (MPL-2.0) as npm has it: ``npm pack axe-core``.
AXE = Path(__file__).parents[2] / "support" / "axe" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
ANSWER = """\
Here it **is**: $e^{i\\pi} = -1$

| way | tokens/s |
|:--|--:|
| one | 12 |

```python
def f() -> str:
    return "<b>"
```
"""


def check_page(browser: Browser, *rules: str) -> list[tuple[str, str]]:
    """What axe-core finds on the page as it is: rule and element."""
    options = {"resultTypes": ["violations"]}
    options |= {"runOnly": list(rules)} if rules else {"runOnly": RULES}  # type: ignore[dict-item]
    found: list[dict[str, Any]] = browser.run(
        "return (await axe.run(arguments[0])).violations", options
    )
    return [(one["id"], node["html"][:120]) for one in found for node in one["nodes"]]


def test_wcag(
    backend: FakeBackend, page: Callable[..., Browser], administration: FakeAdministration
) -> None:
    source = AXE.read_bytes().replace(b"\r\n", b"\n")
    assert hashlib.sha256(source).hexdigest() == AXE_SHA256
    backend.answer = ANSWER
    backend.swarm |= {
        "models": [{"name": "tiny", "ready": 1}],
        "pairing_requests": [{"name": "new", "code": "4827-1931", "address": "192.168.1.9"}],
    }
    browser = wait_until_ready(page(at=f"#owner={TOKEN}"))
    browser.wait_for("#waiting-list .card")
    browser.wait_for("#model-list .item")
    browser.run(source.decode())
    assert browser.run("return axe.version") == "4.14.1"
    found = [("the swarm", *one) for one in check_page(browser)]
    browser.click("#close-manage")
    ask_question(browser, "Show it.")
    for panel in ("list", "swarm"):
        browser.click(f"#open-{panel}")
    found += [("the chat", *one) for one in check_page(browser)]
    for dialog in ("settings", "prompts"):
        browser.click(f"#open-{dialog}")
        found += [(dialog, *one) for one in check_page(browser)]
        browser.run(f"document.querySelector('#{dialog}').close()")
    browser.run("document.documentElement.dataset.theme = 'dark'")
    found += [("dark", *one) for one in check_page(browser, "color-contrast")]
    assert found == []
    # It does find faults.
    browser.run("document.querySelector('#send').removeAttribute('aria-label')")
    assert [rule for rule, _ in check_page(browser)] == ["button-name"]
