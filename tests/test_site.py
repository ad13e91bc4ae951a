"""The documentation site contains every page and command, and its links lead to existing places."""

import importlib.util
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from molinkd.api.openapi import REQUEST_BODIES
from molinkd.cli.lazy_commands import COMMAND_NAMES, GROUP_NAMES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def load_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    pages: dict[str, str] = hooks.generate_pages()
    return pages


def nav_pages(nav: list[Any] | dict[str, Any] | str) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(each)


def test_every_page_is_in_the_navigation_once(generated: dict[str, str]) -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages |= {page for page in generated if page.endswith(".md")}
    decisions = {page for page in pages if re.match(r"decisions/\d", page)}
    assert sorted(nav_pages(CONFIG["nav"])) == sorted(pages - decisions)
    listed = _LINK.findall((DOCS / "decisions" / "README.md").read_text(encoding="utf-8"))
    assert {posixpath.basename(page) for page in decisions} <= set(listed)


def test_links_lead_to_what_the_site_has(generated: dict[str, str]) -> None:
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.is_file()}
    texts = {page: (DOCS / page).read_text(encoding="utf-8") for page in own if page[-3:] == ".md"}
    lost = [
        f"{page}: {target}"
        for page, text in {**texts, **generated}.items()
        for target in _LINK.findall(hooks.move_links(text, page))
        if posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        not in own | generated.keys()
    ]
    assert lost == []


def test_links_between_files_become_links_between_pages() -> None:
    assert hooks.move_links("[a](docs/clients.md#tools) [b](LICENSE)", "index.md") == (
        "[a](clients.md#tools) [b](LICENSE.txt)"
    )
    assert hooks.move_links("[a](../../SECURITY.md) [b](#here)", "decisions/0001-a.md") == (
        "[a](../security.md) [b](#here)"
    )


def test_the_reference_has_every_command(generated: dict[str, str]) -> None:
    page = generated[hooks.COMMANDS_PAGE]
    shown = re.findall(r"^## molink (.+)\n\n```text\nUsage: molink \1 ", page, re.MULTILINE)
    assert {*COMMAND_NAMES, *GROUP_NAMES, "service install", "bench serve"} <= set(shown)


def test_the_reference_has_every_body(generated: dict[str, str]) -> None:
    page = generated[hooks.HTTP_PAGE]
    for path, kind in REQUEST_BODIES.items():
        assert f"| `POST {path}` | [{kind.__name__}](#{kind.__name__.lower()}) |" in page
        fields = page.partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
        assert {f"`{name}`" for name in kind.__struct_encode_fields__} <= set(
            re.findall(r"`\w+`", fields)
        )


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, "integer ≥ 1"),
        (
            {"type": "array", "items": {"$ref": "#/components/schemas/Tool"}},
            "list of [Tool](#tool)",
        ),
        ({"enum": ["a", 1]}, '`"a"`, `1`'),
        ({"default": None}, "unsupported"),
        ({}, "any"),
    ],
)
def test_types_are_said_in_words(schema: dict[str, Any], words: str) -> None:
    assert hooks.describe_type(schema) == words
