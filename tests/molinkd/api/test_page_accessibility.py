"""The page follows WCAG 2.2 AA: checked by axe-core, and used with the keyboard alone."""

from collections.abc import Callable

from tests.support.chat_page import (
    ask_question,
    check_page,
    load_axe,
    needs_chromium,
    wait_until_ready,
)
from tests.support.fake_administration import TOKEN, FakeAdministration
from tests.support.fake_backend import FakeBackend
from tools.browser import Browser

pytestmark = needs_chromium

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


def test_wcag(
    backend: FakeBackend, page: Callable[..., Browser], administration: FakeAdministration
) -> None:
    backend.answer = ANSWER
    backend.swarm |= {
        "models": [{"name": "tiny", "ready": 1}],
        "pairing_requests": [{"name": "new", "code": "4827-1931", "address": "192.168.1.9"}],
    }
    browser = wait_until_ready(page(at=f"#owner={TOKEN}"))
    browser.wait_for("#waiting-list .card")
    browser.wait_for("#model-list .item")
    load_axe(browser)
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
    # axe-core does find faults where there are some.
    browser.run("document.querySelector('#send').removeAttribute('aria-label')")
    assert [rule for rule, _ in check_page(browser)] == ["button-name"]
