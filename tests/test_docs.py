"""Documents name only existing paths, classes, functions, ``tools`` modules and link targets."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from molink.checkpoint.families import ARCHITECTURES
from molink.checkpoint.multimodal import FLAT_MODELS, TEXT_MODELS
from molink.facts.drafts import AUTO_DRAFTS
from molink.gguf.family_configs import FAMILY_CONFIGS
from molink.text.tool_calls.formats import TOOL_CALL_FORMATS
from molink.wire.protocol import PROTOCOL
from molinkd.cli.swarm_file import ModelSection, SwarmFile, read_swarm_file
from molinkd.coordinator.schema import SCHEMA_VERSION, UPGRADES
from molinkd.peer.settings import SETTING_NAMES, Settings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CHANGELOG.md",
            "CODE_OF_CONDUCT.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "configs/README.md",
            "deploy/README.md",
            "examples/README.md",
        )
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_PATH = re.compile(r"(?<![\w./-])(?:molink|daemon|configs|tools|tests|docs)/[\w./-]*\w")
#: A deleted tool is named together with the commit that had it, in the same paragraph.
_TOOL = re.compile(r"\btools\.(\w+)")
_AT_COMMIT = re.compile(r"\bat\s+[0-9a-f]{8}\b")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
#: Documents whose names of classes, functions and constants are checked, and names in them that
#: are not molink's.
_CODE_DOCUMENTS = [ROOT / "docs" / name for name in ("architecture.md", "development.md")]
_FOREIGN_NAMES = {"EFBIG", "ENOSPC", "ProcessPoolExecutor", "ProcessPrng", "quantization_config"}
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_CLASS_NAME = re.compile(r"(?<!\w)(?:[A-Z][a-z0-9]+){2,}(?!\w)")
#: A class, constant, function, method or field: ``Name``, ``a_name``, ``Class.name``.
_NAME = re.compile(r"_?[A-Z]\w+(?:\.(?!md)\w+)?|\w*[a-zA-Z]_\w+")
#: A module without its folder, and names that stand behind a module's path.
_MODULE = re.compile(r"\w+\.py")
_NAMES_OF_MODULE = re.compile(r"`([\w/]+/\w+\.py)`((?:,?\s`(?!\w+\.py`)[\w.]+`)+)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def headings(text: str) -> set[str]:
    """Anchors that GitHub derives from headings."""
    return {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in _HEADING.findall(text)
    }


@functools.cache
def defined_names(path: Path) -> frozenset[str]:
    """Names of a module's classes, functions, constants, methods (``Class.name``) and fields."""
    found = set()
    scopes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while scopes:
        scope = scopes.pop()
        # Expressions define nothing, and make up most of a file.
        scopes += (one for one in ast.iter_child_nodes(scope) if not isinstance(one, ast.expr))
        if isinstance(scope, ast.Module | ast.ClassDef):
            names = set()
            for node in scope.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names.update(one.id for one in targets if isinstance(one, ast.Name))
            found |= names
            if isinstance(scope, ast.ClassDef):
                found.update(f"{scope.name}.{name}" for name in names)
    return frozenset(found)


@functools.cache
def all_names() -> frozenset[str]:
    """Defined names of the packages and of the tests, and their modules' file names."""
    modules = [path for place in ("molink", "daemon", "tests") for path in python_files(place)]
    return frozenset(path.name for path in modules).union(*map(defined_names, modules))


def python_files(place: str) -> list[Path]:
    return sorted((ROOT / place).rglob("*.py"))


def missing_names(document: Path) -> list[str]:
    """Names of code in code spans of ``document`` that don't exist, or not in their module."""
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    found = set()
    for span in _CODE.findall(text):
        found.update(_CLASS_NAME.findall(span))
        if _NAME.fullmatch(span) or _MODULE.fullmatch(span):
            found.add(span)
    wrong = found - all_names() - _FOREIGN_NAMES
    for path, names in _NAMES_OF_MODULE.findall(text):
        if (ROOT / path).exists():
            listed = set(_CODE.findall(names))
            wrong.update(f"{path} {name}" for name in listed - defined_names(ROOT / path))
    return sorted(name for name in wrong if "NAME" not in name)


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
def test_document_names_existing_code(document: Path) -> None:
    assert missing_names(document) == []


def test_missing_names_of_code_are_found(tmp_path: Path) -> None:
    document = tmp_path / "wrong.md"
    document.write_text(
        "`FormerPolicy`, `FormerQueue.take`, `RequestQueues`, `LowBitLayout`, `Scheduler`, "
        "FormerText, `ProcessPrng`, `former_function`, `next_admitted`, `Scheduler.former`, "
        "`Scheduler.next_batch`, `former.py`, `low_bit.py`\n\n"
        "`molink/scheduler/scheduler.py` `Scheduler`, `RequestQueues`\n\n"
        "```bash\nFormerCommand `FormerFence`\n```\n",
        encoding="utf-8",
    )
    assert missing_names(document) == [
        "FormerPolicy",
        "FormerQueue",
        "FormerQueue.take",
        "Scheduler.former",
        "former.py",
        "former_function",
        "molink/scheduler/scheduler.py RequestQueues",
    ]


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(SETTING_NAMES)


def spellings(value: object) -> set[str]:
    """How docs/settings.md may write a default."""
    if isinstance(value, tuple) and value:
        return {"-".join(map(str, value))}
    if not value and value is not False:
        words = "none", "empty", "off", "auto", "host name", "all interfaces", "by the device", "0"
        return set(words)
    if isinstance(value, bool):
        return {str(value).lower()}
    if isinstance(value, int) and value >= 1 << 20:
        return {f"{value >> 20} MiB", f"{value >> 30}GiB"}
    return (
        {"auto"}
        if value == AUTO_DRAFTS
        else {f"{value:g}" if value.__class__ is float else str(value)}
    )


def test_documented_defaults_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", text, re.MULTILINE)
    assert len(rows) == len(SETTING_NAMES)
    settings = Settings()
    wrong = []
    for name, default in rows:
        owner = settings if name in Settings.__struct_fields__ else settings.pipeline
        if default not in spellings(getattr(owner, name)):
            wrong.append(f"{name}: {default}")
    assert wrong == []


def test_every_family_is_documented() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.partition("\n## Families\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", table)
    assert sorted(named) == sorted([*ARCHITECTURES, *TEXT_MODELS, *FLAT_MODELS])
    listed = text.partition("\n- Architectures: ")[2].partition(".\n")[0]
    assert sorted(re.findall(r"`([^`]+)`", listed)) == sorted(FAMILY_CONFIGS)


def test_every_tool_call_format_is_documented() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.partition("\n| `tool_call_parser` |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(TOOL_CALL_FORMATS)


def test_swarm_file_fields_are_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "swarm-file.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [*SwarmFile.__struct_fields__, *ModelSection.__struct_fields__]
    example = tmp_path / "swarm.toml"
    example.write_text(text.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    assert len(read_swarm_file(example)[0].models) == 2


def test_the_table_of_releases_names_the_present_numbers() -> None:
    text = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    first, *_ = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| ([\d, ]+) \|$", text, re.MULTILINE)
    assert first == (str(PROTOCOL), str(SCHEMA_VERSION), ", ".join(map(str, sorted(UPGRADES))))
    assert sorted(UPGRADES) == list(range(min(UPGRADES), SCHEMA_VERSION)), "no gap"


def test_no_word_is_misspelt() -> None:
    """In code, tests and documents, as codespell knows misspellings."""
    folders = ("configs", "daemon", "deploy", "docs", "examples", "molink", "tests", "tools")
    files = [path.name for path in ROOT.glob("*.*") if path.suffix in (".md", ".ps1", ".sh")]
    ended = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *folders, *sorted(files)],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)
