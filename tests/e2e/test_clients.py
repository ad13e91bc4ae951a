"""Libraries that people use, against a swarm of three processes that holds the bundled model.

It knows no tools, so it has another chat template, and calls are enforced.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.checkpoint.source import demo_model
from tests.support import tool_templates
from tests.support.clients import node_script, python_program, told
from tests.support.processes import Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent / "clients"
NAME = "toy"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / NAME
    shutil.copytree(demo_model().path, folder)
    (folder / "chat_template.jinja").write_text(tool_templates.HERMES, encoding="utf-8")
    home = tmp_path_factory.mktemp("clients")
    process = Process(home, ["demo", "--dtype", "f32", "--model", str(folder)])
    try:
        process.wait_ready()
        yield f"{process.found().endpoints[1]}/v1"
    finally:
        process.stop()


@pytest.mark.parametrize("script", ["langchain_client.py", "litellm_client.py"])
def test_of_python(script: str, request: pytest.FixtureRequest) -> None:
    command = [python_program("python"), str(SCRIPTS / script)]
    print(told(command, request.getfixturevalue("url"), NAME))


@pytest.mark.parametrize("script", ["openai_client.mjs", "ai_client.mjs"])
def test_of_node(script: str, request: pytest.FixtureRequest) -> None:
    command = node_script(SCRIPTS / script)
    print(told(command, request.getfixturevalue("url"), NAME))
