"""Workflows, issue forms, hooks and the dev container name only what exists. None has been run."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from molinkd.peer.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_pre_commit_runs_the_checks_of_the_installer() -> None:
    script = (ROOT / "install.sh").read_text(encoding="utf-8")
    checks = dict(re.findall(r'^  check "([^"]+)" (.+)$', script, re.MULTILINE))
    assert checks.pop("pytest").startswith("-m pytest")
    (local,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert {hook["name"]: shlex.split(hook["entry"]) for hook in local["hooks"]} == {
        name: ["python", *shlex.split(words)] for name, words in checks.items()
    }


def test_the_dev_container_runs_the_installer() -> None:
    """Checked once by ``read-configuration`` of @devcontainers/cli 0.89.0, and by its schema."""
    path = ROOT / ".devcontainer" / "devcontainer.json"
    made = json.loads(path.read_text(encoding="utf-8"))
    assert faults(made["postCreateCommand"], set()) == []
    assert made["forwardPorts"] == [Settings(name="x").api_port]
    assert made["portsAttributes"].keys() == {str(port) for port in made["forwardPorts"]}
    editor = made["customizations"]["vscode"]["settings"]
    python = editor["python.defaultInterpreterPath"]
    assert python == "${containerWorkspaceFolder}/.venv/bin/python"
    image = re.fullmatch(r"mcr\.microsoft\.com/devcontainers/python:(3\.\d+)-\w+", made["image"])
    assert image is not None
    assert tuple(map(int, image[1].split("."))) >= (3, 11)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_have_what_github_asks_for(path: Path) -> None:
    form = load(path)
    assert (
        {"name", "description", "body"} <= form.keys() <= {"name", "description", "labels", "body"}
    )
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field["validations"]["required"] for field in fields if "validations" in field)
    names = [field["id"] for field in fields]
    assert sorted(set(names)) == sorted(names)


def steps(workflow: Any) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def faults(command: str, installed: set[str]) -> list[str]:
    """What a command names that does not exist, neither locked nor ``installed`` before."""
    words = shlex.split(command)
    modules = {"pip", "venv"} | installed
    modules |= {f"tools.{path.stem}" for path in (ROOT / "tools").glob("*.py")}
    for lock in (ROOT / "requirements").glob("*.txt"):
        modules |= set(re.findall(r"^([\w-]+)==", lock.read_text(encoding="utf-8"), re.MULTILINE))
    found = []
    script = ""
    for before, word in zip(["", *words], words, strict=False):
        if re.fullmatch(r"[\w./-]+\.(?:sh|ps1|py|txt)|(?:tests|tools|docs)/\S+", word):
            script = word if word.endswith((".sh", ".ps1")) else script
            found += [word] * (not (ROOT / word).exists())
        elif word.startswith("--") and script and (ROOT / script).exists():
            usage = (ROOT / script).read_text(encoding="utf-8")
            found += [word] * (not re.search(rf"^  .*{word}\b", usage, re.MULTILINE))
        elif "/bin/" in word and "python" not in word:
            found += [word] * (word.rpartition("/")[2] not in PYPROJECT["project"]["scripts"])
        elif before == "-m" and "pytest" in words[: words.index(word)]:
            marks = PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]
            found += [word] * (not any(mark.startswith(f"{word}:") for mark in marks))
        elif before == "-m":
            found += [word] * (word not in modules)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(path: Path) -> None:
    commands = [step["run"] for step in steps(load(path)) if "run" in step]
    installed = {
        word
        for command in commands
        for word in command.partition(" pip install ")[2].split()
        if re.fullmatch(r"[a-z][\w-]*", word)
    }
    assert commands
    assert [fault for command in commands for fault in faults(command, installed)] == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("./install.sh --tset", "--tset"),
        ("./instal.sh", "./instal.sh"),
        ("python -m pip install -r requirements/dosc.txt", "requirements/dosc.txt"),
        (".venv/bin/molnik doctor", ".venv/bin/molnik"),
        ("python -m mkdosc build", "mkdosc"),
        (".venv/bin/python -m pytest -m slwo", "slwo"),
    ],
)
def test_what_does_not_exist_is_found(command: str, fault: str) -> None:
    assert faults(command, set()) == [fault]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_few_rights_and_an_end(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    assert all(job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())
    # YAML 1.1 takes the key `on` for true.
    assert "pull_request_target" not in workflow[True]
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", each) for each in used)
    checkouts = [step for step in steps(workflow) if "checkout" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_no_pull_request_runs_on_a_machine_of_ours() -> None:
    for path in WORKFLOWS:
        workflow = load(path)
        own = any("self-hosted" in job["runs-on"] for job in workflow["jobs"].values())
        assert not own or set(workflow[True]) == {"workflow_dispatch"}, path.name
