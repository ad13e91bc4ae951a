"""Workflows, issue forms and pre-commit hooks name what exists. No workflow has ever run."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
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
