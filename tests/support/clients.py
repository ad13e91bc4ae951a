"""Client libraries that only some tests need, in a folder outside the repository."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

#: Where they are installed.
FOLDER = Path(os.environ.get("MOLINK_CLIENTS", Path(tempfile.gettempdir()) / "molink-clients"))
_PROGRAMS = FOLDER / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
PYTHON = (
    f"{Path(sys.executable).name} -m venv {FOLDER / 'venv'} && "
    f"{_PROGRAMS / 'pip'} install langchain-openai litellm mcp schemathesis"
)
NPM = f"npm install --prefix {FOLDER} openai ai @ai-sdk/openai @ai-sdk/openai-compatible zod"
_TIME_S = 200


def python_program(name: str) -> str:
    """The path of a program that ``PYTHON`` installs; skips the test if it isn't there."""
    found = shutil.which(name, path=str(_PROGRAMS))
    if found is None:
        pytest.skip(f"clients of Python are not installed: {PYTHON}")
    return found


def node_script(script: Path) -> list[str]:
    """The command that runs ``script`` beside what ``NPM`` installs; skips if it isn't there."""
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules" / "ai").is_dir():
        pytest.skip(f"clients of Node.js (20 or newer) are not installed: {NPM}")
    return [node, shutil.copy(script, FOLDER / script.name)]


def run_json(command: list[str], *arguments: str) -> Any:
    """The JSON in the last output line of a client's script, which must succeed."""
    variables = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=_TIME_S,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])
