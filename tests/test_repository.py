"""Rules of the repository: dependencies, banned calls, sizes, and the content of a wheel."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Folders of the packages, by import name.
PLACES = {
    "molink": ROOT / "molink",
    "molinkd": ROOT / "daemon" / "molinkd",
    "molink.configs": ROOT / "configs",
    "molinkd.units": ROOT / "daemon" / "units",
}
SOURCES = sorted(path for place in PLACES.values() for path in place.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Packages that molink imports; stages also need the extra.
NEEDED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["torch"]]

#: Modules that turn bytes into objects, or execute them.
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "msgpack_numpy"}
#: Calls by the dotted name in the source.
BANNED_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "os.fork",
    "os.forkpty",
    "os.system",
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
}
MAX_LINES = 800

#: Packages that compute, and may import torch. All others run in a daemon or a command, where torch
#: would cost a second and 200 MB.
COMPUTING = ("molink.stage", "molinkd.worker")

#: Packages that tools and tests need without importing them.
TEST_TOOLS = {
    "codespell",
    "import-linter",
    "mypy",
    "pytest-asyncio",
    "pytest-timeout",
    "ruff",
    "setuptools",
}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Top-level modules that a file imports anywhere."""
    found: set[str] = set()
    nodes: list[ast.AST] = [parse(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        # Expressions import nothing, and make up most of a file.
        nodes += (one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.expr))
    return frozenset(found)


def imported(paths: list[Path]) -> dict[str, Path]:
    """Top-level modules that are imported anywhere, with one place each."""
    return {name: path for path in reversed(paths) for name in imports_of(path)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0]) for line in requirements}


@functools.cache
def providers() -> Mapping[str, list[str]]:
    """The distributions that provide each module, from the file lists of installed packages."""
    return packages_distributions()


def distributions(paths: list[Path], own: set[str]) -> set[str]:
    """Distributions behind the third-party imports of ``paths``."""
    owners = providers()
    needed = set()
    for module, path in imported(paths).items():
        if module in sys.stdlib_module_names or module in own:
            continue
        assert module in owners, f"{path} imports {module}, which no installed package provides"
        needed.add(normal(owners[module][0]))
    return needed


def test_every_dependency_is_imported_and_every_import_declared() -> None:
    needed = distributions(SOURCES, {"molink", "molinkd", "triton"})
    # On Linux torch requires its own version of triton.
    assert needed | {"triton-windows"} == declared(NEEDED)


def test_the_test_extra_is_what_tests_and_tools_need() -> None:
    both = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    # These run with packages of their own (tests/support/clients.py).
    paths = sorted(path for path in both if path.parent != ROOT / "tests" / "e2e" / "clients")
    own = {
        "molink",
        "molinkd",
        "tools",
        "tests",
        *(path.stem for path in paths),
        *(path.parent.name for path in paths),
    }
    extra = declared(PROJECT["optional-dependencies"]["test"])
    needed = distributions(paths, own) - declared(NEEDED)
    assert needed | TEST_TOOLS == extra | TEST_TOOLS
    assert extra >= TEST_TOOLS


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_text_file_call(call: ast.Call, name: str) -> bool:
    """Whether the call opens, reads or writes a text file."""
    method = name.rpartition(".")[2]
    if method in ("read_text", "write_text"):
        return True
    if name != "open" and not (method == "open" and name.count(".") == 1 and len(call.args) <= 1):
        return False
    places = call.args[1:] if name == "open" else call.args
    modes = [*places[:1], *(word.value for word in call.keywords if word.arg == "mode")]
    return all(
        isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value
        for mode in modes
    )


@functools.cache
def uses_of(path: Path) -> tuple[ast.Attribute | ast.Call, ...]:
    """All calls and attributes of a file."""
    nodes = ast.walk(parse(path))
    return tuple(node for node in nodes if isinstance(node, ast.Attribute | ast.Call))


def faults(path: Path) -> Iterator[str]:
    for node in uses_of(path):
        if isinstance(node, ast.Attribute):
            found = [node.attr] * node.attr.endswith("_pyobj")
        else:
            name = dotted(node.func)
            found = [f"calls {name}"] * (name in BANNED_CALLS)
            found += ["runs a shell"] * any(
                word.arg == "shell"
                and not (isinstance(word.value, ast.Constant) and word.value.value is False)
                for word in node.keywords
            )
        for fault in found:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {fault}"


def test_the_package_neither_unpickles_nor_evaluates_nor_forks() -> None:
    assert BANNED_MODULES.isdisjoint(imported(SOURCES))
    assert [fault for path in SOURCES for fault in faults(path)] == []


@pytest.mark.parametrize(
    "source",
    ["eval('1')", "torch.load(f)", "s.recv_pyobj()", "run(x, shell=True)", "os.fork()"],
)
def test_the_ban_bites(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text(source, encoding="utf-8")
    assert len(list(faults(path))) == 1


def test_text_files_name_their_encoding() -> None:
    nameless = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in uses_of(path)
        if isinstance(node, ast.Call)
        and is_text_file_call(node, dotted(node.func))
        and not any(word.arg == "encoding" for word in node.keywords)
    ]
    assert nameless == []


def test_modules_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_tests_lie_where_what_they_test_does() -> None:
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    elsewhere = {Path("chaos"), Path("dst"), Path("e2e"), Path("tools")}
    packages = (ROOT / "molink", ROOT / "daemon")
    assert [
        folder for folder in folders - elsewhere if not any((p / folder).is_dir() for p in packages)
    ] == []


def module_name(path: Path) -> str:
    """What a source file is imported as."""
    name, place = next(each for each in reversed(PLACES.items()) if path.is_relative_to(each[1]))
    return ".".join((name, *path.relative_to(place).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def test_daemon_and_commands_never_import_torch() -> None:
    modules = [
        module_name(path)
        for path in SOURCES
        if not module_name(path).startswith(COMPUTING) and path.name != "__main__.py"
    ]
    # The parts of a worker that don't compute, so that they can be used without a model.
    modules.append("molinkd.worker.worker")
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & sys.modules.keys()\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    subprocess.run([sys.executable, "-c", code, *modules], check=True, cwd=ROOT, timeout=100)


def test_the_wheel_has_all_data_and_nothing_else(built_wheel: Path) -> None:
    with zipfile.ZipFile(built_wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "molink = molinkd.cli.main:main" in wheel.read(points).decode()
        licence = next(name for name in wheel.namelist() if name.endswith("/LICENSE"))
        assert b"Apache License" in wheel.read(licence)
    expected = {
        f"{name.replace('.', '/')}/{path.relative_to(place).as_posix()}"
        for name, place in PLACES.items()
        for path in place.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected
    assert "molink/py.typed" in names
    assert any(name.endswith(".safetensors") for name in names)
