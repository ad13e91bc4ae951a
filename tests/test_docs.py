"""Documents name only existing paths, classes, ``tools`` modules and link targets."""

import ast
import functools
import re
from pathlib import Path

import pytest

from molinkd.cli.swarm_file import ModelSection, SwarmFile, read_swarm_file
from molinkd.peer.settings import SETTING_NAMES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(
        ROOT / name
        for name in ("README.md", "SECURITY.md", "deploy/README.md", "configs/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_PATH = re.compile(r"(?<![\w./-])(?:molink|daemon|configs|tools|tests|docs)/[\w./-]*\w")
#: A tool that was deleted since is named with the commit that had it, in the same paragraph.
_TOOL = re.compile(r"\btools\.(\w+)")
_AT_COMMIT = re.compile(r"\bat\s+[0-9a-f]{8}\b")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
#: Documents whose class names are checked, and names in them that are not molink's.
_CODE_DOCUMENTS = [ROOT / "docs" / name for name in ("architecture.md", "development.md")]
_FOREIGN_CLASSES = {"ProcessPoolExecutor", "ProcessPrng"}
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_CLASS_NAME = re.compile(r"(?<!\w)(?:[A-Z][a-z0-9]+){2,}(?!\w)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def headings(text: str) -> set[str]:
    """Anchors that GitHub derives from headings."""
    return {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in _HEADING.findall(text)
    }


@functools.cache
def defined_types() -> frozenset[str]:
    """Names of classes and type aliases of the packages."""
    found = set()
    for path in [*(ROOT / "molink").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found.update(one.id for one in node.targets if isinstance(one, ast.Name))
    return frozenset(found)


def missing_classes(document: Path) -> list[str]:
    """Class names in code spans of ``document`` that don't exist."""
    spans = _CODE.findall(_FENCED.sub("", document.read_text(encoding="utf-8")))
    names = {name for span in spans for name in _CLASS_NAME.findall(span)}
    return sorted(names - defined_types() - _FOREIGN_CLASSES)


def missing(document: Path) -> list[str]:
    """Names in ``document`` that don't exist."""
    text = document.read_text(encoding="utf-8")
    found = [
        path for path in _PATH.findall(text) if "NAME" not in path and not (ROOT / path).exists()
    ]
    for block in re.split(r"\n\n|\n(?=\||- |\d+\. )", text):
        for name in () if _AT_COMMIT.search(block) else _TOOL.findall(block):
            if not any((ROOT / "tools" / place).exists() for place in (name, f"{name}.py")):
                found.append(f"tools.{name}")
    for place, anchor in _LINK.findall(text):
        target = document.parent / place if place else document
        if not target.exists():
            found.append(place)
        elif anchor and anchor not in headings(target.read_text(encoding="utf-8")):
            found.append(f"{place}#{anchor}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_names_existing_things(document: Path) -> None:
    assert missing(document) == []


def test_missing_names_are_found(tmp_path: Path) -> None:
    document = tmp_path / "wrong.md"
    document.write_text(
        "# Title\n`molink/nowhere.py`, `tools.nothing`, [a](b.md), [c](#d), [fine](#title)\n\n"
        "`python -m tools.gone` at 05be9d4b\n",
        encoding="utf-8",
    )
    assert missing(document) == ["molink/nowhere.py", "tools.nothing", "b.md", "#d"]


@pytest.mark.parametrize("document", _CODE_DOCUMENTS, ids=lambda path: path.name)
def test_document_names_existing_classes(document: Path) -> None:
    assert missing_classes(document) == []


def test_missing_classes_are_found(tmp_path: Path) -> None:
    document = tmp_path / "wrong.md"
    document.write_text(
        "`FormerPolicy`, `FormerQueue.take`, `RequestQueues`, `LowBitLayout`, `Scheduler`, "
        "FormerText, `ProcessPrng`\n\n```bash\nFormerCommand `FormerFence`\n```\n",
        encoding="utf-8",
    )
    assert missing_classes(document) == ["FormerPolicy", "FormerQueue"]


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(SETTING_NAMES)


def test_swarm_file_fields_are_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "swarm-file.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [*SwarmFile.__struct_fields__, *ModelSection.__struct_fields__]
    example = tmp_path / "swarm.toml"
    example.write_text(text.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    assert len(read_swarm_file(example)[0].models) == 2
