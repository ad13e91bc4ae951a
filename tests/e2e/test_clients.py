"""Libraries that people use, against a swarm of three processes that holds the bundled model.

It knows no tools, so it has another chat template, and calls are enforced.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pydantic
import pytest

from molink.checkpoint.model_source import find_demo_model
from tests.support import tool_templates
from tests.support.clients import node_script, python_program, run_json
from tests.support.examples import load_script
from tests.support.processes import Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent / "clients"
NAME = "toy"
HI: Any = [{"role": "user", "content": "What is molink?"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / NAME
    shutil.copytree(find_demo_model().path, folder)
    (folder / "chat_template.jinja").write_text(tool_templates.HERMES, encoding="utf-8")
    home = tmp_path_factory.mktemp("clients")
    process = Process(home, ["demo", "--dtype", "f32", "--model", str(folder)])
    try:
        process.wait_ready()
        yield f"{process.found().endpoints[1]}/v1"
    finally:
        process.stop()


def test_tools_of_official_clients(url: str) -> None:
    class Weather(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")

        city: str = pydantic.Field(max_length=9)

    with openai.OpenAI(base_url=url, api_key="-") as client:
        with client.chat.completions.stream(
            model=NAME,
            messages=HI,
            tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
            tool_choice="required",
            parallel_tool_calls=False,
        ) as stream:
            message = stream.until_done().get_final_completion().choices[0].message
        (call,) = message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Weather)
        parameters = Weather.model_json_schema()
        tool = {"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}
        choice = {"type": "function", "name": "get_weather"}
        said = client.responses.create(model=NAME, input=HI, tools=[tool], tool_choice=choice)
        assert Weather.model_validate_json(said.output[-1].arguments)
    root = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key="-") as other:
        answer = other.messages.create(
            model=NAME,
            max_tokens=400,
            messages=HI,
            tools=[{"name": "get_weather", "input_schema": parameters}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert Weather.model_validate(answer.content[-1].input)
    talk = ollama.Client(host=root)
    try:
        # Nothing enforces a call there: text, or a call of the tool.
        found = talk.chat(NAME, HI, tools=[{"type": "function", "function": {**tool}}])
    finally:
        talk._client.close()
    assert found.message.content or found.message.tool_calls


def test_the_agent_of_the_examples(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    agent = load_script("agent")
    choice = {"type": "function", "function": {"name": "measure_disk"}}
    with openai.OpenAI(base_url=url, api_key="-") as client:
        assert agent.run_agent(client, NAME, "Which disk is full?", choice)
    assert re.search(r"measure_disk\(.+\) = \d+% of", capsys.readouterr().out)


@pytest.mark.parametrize("script", ["langchain_client.py", "litellm_client.py"])
def test_of_python(script: str, request: pytest.FixtureRequest) -> None:
    command = [python_program("python"), str(SCRIPTS / script)]
    print(run_json(command, request.getfixturevalue("url"), NAME))


@pytest.mark.parametrize("script", ["openai_client.mjs", "ai_client.mjs"])
def test_of_node(script: str, request: pytest.FixtureRequest) -> None:
    command = node_script(SCRIPTS / script)
    print(run_json(command, request.getfixturevalue("url"), NAME))
