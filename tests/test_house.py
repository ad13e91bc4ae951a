"""The rules of names, sizes and docstrings that keep the code searchable."""

import ast
import collections
import functools
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "molink", ROOT / "daemon" / "molinkd")
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve())
#: Texts that the bundled model was trained on.
CORPUS = ROOT / "tools" / "demo_model"

MAX_MODULE_LINES = 800
MAX_FUNCTION_LINES = 60
#: Names that say nothing to a reader who searches for them.
BARE_NAMES = {"take", "told", "over", "look", "arrived", "goes", "given", "forget", "gone", "heard"}
#: Part of the public methods whose names have a verb and an object.
MIN_COMPOUND_SHARE = 0.6
#: Words that the glossary of docs/architecture.md replaces, with their replacements.
RETIRED_WORDS = {
    "agenda": "event queue",
    "allotment": "allocation",
    "applier": "apply handler",
    "bringer": "model loader",
    "commons": "controller context",
    "copier": "replicator",
    "detour": "relayed route",
    "doorbell": "pairing prompt",
    "gatekeeper": "authenticator",
    "hygiene": "sanitizing",
    "knock": "pairing request",
    "lane": "channel",
    "lookout": "discovery scanner",
    "offence": "misbehaviour",
    "offender": "banned peer",
    "pauser": "pause controller",
    "porch": "pairing listener",
    "roster": "request queues",
    "succession": "leader election",
    "supplier": "source",
    "tick": "seq",
    "unpaired": "prefill-only",
    "victim": "preemption candidate",
    "wishes": "desired state",
}
#: Phrases that sound translated or old, with plain ones.
RETIRED_PHRASES = {
    "anew": "again",
    "as far as": "if, or up to",
    "foretell": "predict",
    "foretold": "predicted",
    "is to be": "must be",
    "of what is": "the name of the thing",
    "say of": "say about",
    "says of": "says about",
    "so many": "the number's name",
    "what becomes of": "the name of the result",
    "whatever": "any, or regardless of",
}

_UNIT_NAME = re.compile(
    r"(?:_s|_ms|_gb|_mb|_at|now|seconds|time|timeout|rate|share|factor|bytes|mbps|probability"
    r"|temperature|ratio|percent|latency|interval|deadline|weight|penalty|slowdown|delay|duration)$"
)
_UNIT = re.compile(
    r"second|byte|token|row|layer|percent|share|factor|ratio|\bper\b|/s\b|0 to 1|\b[MG]B|Mbps|times"
    r"|probabilit|weight|number|count|\bms\b|\bs\b",
    re.IGNORECASE,
)
_SHAPE = re.compile(r"\[|shape|row|×|column|vector")
_TENSORS = {"torch.Tensor", "Tensor", "np.ndarray"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def where(path: Path, node: ast.stmt) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"


def public_classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in SOURCES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield path, node


def public_functions() -> Iterator[tuple[Path, Function, ast.ClassDef | None]]:
    """Functions of modules, and methods of all classes, whose names have no underscore in front."""
    for path in SOURCES:
        for node in parse(path).body:
            owner = node if isinstance(node, ast.ClassDef) else None
            for one in owner.body if owner else [node]:
                if isinstance(one, Function) and not one.name.startswith("_"):
                    yield path, one, owner


def is_property(function: Function) -> bool:
    return any("property" in ast.unparse(one) for one in function.decorator_list)


def test_a_class_name_exists_once() -> None:
    found = collections.defaultdict(list)
    for path, node in public_classes():
        # A second definition in one file is the other branch of a platform check.
        found[node.name].append(path)
    assert {name: set(paths) for name, paths in found.items() if len(set(paths)) > 1} == {}


def test_no_public_method_has_a_bare_name() -> None:
    assert [
        f"{where(path, one)} {one.name}"
        for path, one, _ in public_functions()
        if one.name in BARE_NAMES
    ] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_method_names_have_a_verb_and_an_object(package: Path) -> None:
    names = [
        one.name
        for path, one, owner in public_functions()
        if owner is not None and not is_property(one) and path.is_relative_to(package)
    ]
    assert sum("_" in name for name in names) >= MIN_COMPOUND_SHARE * len(names)


def test_modules_and_functions_stay_small() -> None:
    large = []
    for path in [*SOURCES, *TOOLS]:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MAX_MODULE_LINES:
            large.append(f"{path.relative_to(ROOT).as_posix()}: {lines} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, Function):
                # Command-line options and documentation are no logic.
                logic = node.body[1 if ast.get_docstring(node) and node.body[1:] else 0]
                length = (node.end_lineno or node.lineno) - logic.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    large.append(f"{where(path, node)} {node.name}: {length} lines")
    assert large == []


def test_public_functions_say_units_and_shapes() -> None:
    """A number of unclear unit, and each tensor, is described where the function is."""
    unclear = []
    for path, one, owner in public_functions():
        text = f"{ast.get_docstring(one) or ''} {(owner and ast.get_docstring(owner)) or ''}"
        for argument in (*one.args.args, *one.args.kwonlyargs):
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            if kind in ("float", "float | None"):
                clear = _UNIT_NAME.search(argument.arg) or _UNIT.search(text)
            elif kind in _TENSORS:
                clear = _SHAPE.search(text)
            else:
                continue
            if not clear:
                unclear.append(f"{where(path, one)} {one.name}({argument.arg})")
    assert unclear == []


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Words of identifiers, comments and strings, in lower case and singular, with their lines."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
                text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", token.string)
                for word in re.findall(r"[A-Za-z]+", text):
                    lower = word.lower()
                    yield token.start[0], lower
                    yield token.start[0], lower.removesuffix("s")


def find_files_with(phrases: Iterable[str]) -> list[Path]:
    """Files that contain all words of a phrase, which is quicker than to tokenize them all."""
    wanted = [phrase.split() for phrase in phrases]

    def is_suspect(path: Path) -> bool:
        text = path.read_text(encoding="utf-8").lower()
        return any(all(word in text for word in words) for words in wanted)

    paths = [path for path in [*SOURCES, *TOOLS, *TESTS] if not path.is_relative_to(CORPUS)]
    return list(filter(is_suspect, paths))


def test_retired_words_do_not_come_back() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{line}: {word} is {RETIRED_WORDS[word]}"
        for path in find_files_with(RETIRED_WORDS)
        for line, word in words_of(path)
        if word in RETIRED_WORDS and not (word == "lane" and "stage" in path.parts)  # of vectors
    }
    assert sorted(found) == []


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Strings and blocks of comments in lower case on one line, with their first lines."""
    first, last, text, kind = 0, 0, "", tokenize.NL
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.NL:
                continue
            is_next = token.type == tokenize.STRING or token.start[0] <= last + 1
            if token.type != kind or not is_next:
                yield first, " ".join(text.lower().split())
                first, text, kind = token.start[0], "", token.type
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                text += re.sub(r"^#:? ?|^[A-Za-z]*[\"']+|[\"']+$", " ", token.string)
            last = token.end[0]


def test_retired_phrases_do_not_come_back() -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(RETIRED_PHRASES)})\b")
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {phrase} is {RETIRED_PHRASES[phrase]}"
        for path in find_files_with(RETIRED_PHRASES)
        for line, text in prose_of(path)
        for phrase in pattern.findall(text)
    ]
    assert found == []


def test_prose_is_found_across_lines(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text("'''As\n    far\n'''\n#: So\n#: many\nx = (\n    f'is '\n    f'to be'\n)\n")
    assert {"as far", "so many", "is to be"} <= {text for _, text in prose_of(path)}


def test_words_of_names_and_prose_are_found(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text("class LaneQueue:\n    '''Two porches.'''\n    last_ticks = 3  # a knock\n")
    assert {"lane", "queue", "porche", "tick", "knock"} <= {word for _, word in words_of(path)}
