"""MkDocs hooks of the site: pages of files outside ``docs/``, and references made from the code.

``mkdocs.yml`` names this file. The references need molink installed, but no torch.
"""

import contextlib
import io
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

ROOT = Path(__file__).resolve().parent.parent
#: Files outside ``docs/`` that are part of the site, by their path on it.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "code-of-conduct.md": "CODE_OF_CONDUCT.md",
    "configurations.md": "configs/README.md",
    "containers.md": "deploy/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "LICENSE.txt": "LICENSE",
    "examples/index.md": "examples/README.md",
    **{
        f"examples/{path.name}": f"examples/{path.name}"
        for path in sorted((ROOT / "examples").iterdir())
        if path.suffix in (".py", ".service", ".toml", ".yaml")
    },
}
COMMANDS_PAGE = "reference/cli.md"
HTTP_PAGE = "reference/http-api.md"
UNSUPPORTED = "unsupported"

_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)(?=#|\))")
_ROLE = re.compile(r":class:`~?(?:[\w.]+\.)?(\w+)`")
_BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
}


def on_config(config: Any) -> Any:
    """Give headings the anchors that GitHub gives them."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in ``docs/``."""
    from mkdocs.structure.files import File

    for path, text in generate_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages."""
    return move_links(markdown, page.file.src_uri)


def generate_pages() -> dict[str, str]:
    """Return the text of each page that is not in ``docs/``, by its path on the site."""
    pages = {page: (ROOT / file).read_text(encoding="utf-8") for page, file in OUTSIDE.items()}
    pages[COMMANDS_PAGE] = describe_commands()
    pages[HTTP_PAGE] = describe_http(read_openapi())
    return pages


def move_links(text: str, page: str) -> str:
    """Rewrite relative links of the file behind ``page`` to where their targets are on the site."""
    places = {file: place for place, file in OUTSIDE.items()}
    folder = posixpath.dirname(OUTSIDE.get(page, f"docs/{page}"))

    def move(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        place = places.get(target, target.removeprefix("docs/"))
        return link[1] + posixpath.relpath(place, posixpath.dirname(page) or ".")

    return _LINK.sub(move, text)


def describe_commands() -> str:
    """Return a page with the help of every command."""
    from molinkd.cli.main import run

    sections = ["# Commands", "What `molink COMMAND --help` prints, for all commands."]
    for words in list_commands():
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            run([*words, "--help"])
        title = " ".join(("molink", *words))
        sections.append(f"## {title}\n\n```text\n{output.getvalue().strip()}\n```")
    return "\n\n".join(sections) + "\n"


def list_commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command behind ``molink``, groups before their commands."""
    from typer.main import get_command

    from molinkd.cli.lazy_commands import COMMAND_NAMES, GROUP_NAMES
    from molinkd.cli.main import build_app

    yield from ((name,) for name in COMMAND_NAMES)
    app: Any = get_command(build_app(GROUP_NAMES))
    for group in GROUP_NAMES:
        yield (group,)
        yield from ((group, name) for name in app.commands[group].commands)


def read_openapi() -> dict[str, Any]:
    """Return what ``/openapi.json`` answers."""
    from molinkd.api.api_settings import ApiSettings
    from molinkd.api.app import create_app
    from molinkd.api.openapi import encode_document

    # The routes ask nothing of a backend before a request comes.
    app = create_app(Mock(), ApiSettings(), Mock(), Mock())
    document: dict[str, Any] = json.loads(encode_document(app))
    return document


def describe_http(document: dict[str, Any]) -> str:
    """Return a page of an OpenAPI document: its routes, and the fields of their bodies."""
    lines = [
        "# HTTP API",
        "",
        "The routes and bodies of `/openapi.json`; [Clients](../clients.md) says how to use them.",
        "Required fields are **bold**; `null` is the same as leaving a field out. Most",
        "unsupported fields are refused with a 400 that names them.",
        "",
        "| route | body | |",
        "|---|---|---|",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = f"{method.upper()} {path}"
            body = operation.get("requestBody")
            kind = describe_type(body["content"]["application/json"]["schema"]) if body else ""
            about = operation["summary"].removeprefix(f"``{route}``").lstrip(".:, ")
            lines.append(f"| `{route}` | {kind} | {about} |")
    for name, schema in document["components"]["schemas"].items():
        about = _ROLE.sub(r"`\1`", schema.get("description", ""))
        lines += ["", f"## {name}", "", " ".join(about.split()), "", "| field | |", "|---|---|"]
        kinds = {field: describe_type(kind) for field, kind in schema["properties"].items()}
        for field, kind in kinds.items():
            shown = f"**`{field}`**" if field in schema.get("required", ()) else f"`{field}`"
            lines += [f"| {shown} | {kind} |"] if kind != UNSUPPORTED else []
        refused = ", ".join(f"`{field}`" for field, kind in kinds.items() if kind == UNSUPPORTED)
        lines += ["", f"Unsupported: {refused}."] if refused else []
    return "\n".join(lines) + "\n"


def describe_type(schema: dict[str, Any]) -> str:
    """Say in words which values a JSON schema takes."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(
            describe_type(each) for each in schema["anyOf"] if each != {"type": "null"}
        )
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "type" not in schema:
        return UNSUPPORTED if set(schema) == {"default"} else "any"
    if schema["type"] == "array":
        return f"list of {describe_type(schema['items'])}" if schema.get("items") else "list"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([schema["type"], ", ".join(bounds)]).strip()
