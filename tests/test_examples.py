"""The files of ``examples`` are valid and name only what molink has.

None was run by its program.
"""

import configparser
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

import molink
from molink.checkpoint.hub_catalog import load_catalog
from molinkd.cli.swarm_file import read_swarm_file
from molinkd.peer.settings import SETTING_NAMES, Settings, apply_layer, read_environment
from tests.support import manifests
from tests.support.command_lines import check_command
from tests.support.examples import FOLDER, load_script
from tests.support.manifests import ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_a_wrong_command_is_found() -> None:
    check_command(["up", "--model", "molink-demo"])
    with pytest.raises(typer.TyperException):
        check_command(["up", "--modle", "molink-demo"])


def test_every_example_is_listed_once() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\]\(([\w.]+)\)", text)
    there = [path.name for path in FOLDER.iterdir() if path.is_file() and path.name != "README.md"]
    assert sorted(listed) == sorted(there)
    assert len(there) >= 10


@pytest.mark.parametrize("name", ["home.toml", "office.toml"])
def test_swarm_files(name: str) -> None:
    found, _ = read_swarm_file(FOLDER / name)
    known = {entry.name for entry in load_catalog().entries}
    short = [one.model for one in found.models if ":" in one.model]
    assert short
    assert set(short) <= known
    assert found.molink in ("", molink.__version__)


def test_the_unit_is_like_the_one_of_a_user() -> None:
    def read(path: Path) -> configparser.ConfigParser:
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read(path, encoding="utf-8")
        return parser

    unit, user = read(FOLDER / "molink.service"), read(ROOT / "daemon" / "units" / "molink.service")
    for key in ("Restart", "RestartSec", "RestartPreventExitStatus", "KillMode", "TimeoutStopSec"):
        assert unit["Service"][key] == user["Service"][key], key
    program, *words = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "molink"
    check_command(words)


def test_compose() -> None:
    found = load("compose.yaml")
    (service,) = found["services"].values()
    check_command(service["command"])
    given = service["environment"]
    assert given.keys() <= {f"MOLINK_{name.upper()}" for name in SETTING_NAMES}
    settings = apply_layer(read_environment(given), Settings(name="x"), "the file")
    assert settings.api_key, "others in the network can ask"
    (volume,) = service["volumes"]
    name, _, place = volume.partition(":")
    assert name in found["volumes"]
    assert f"VOLUME {place}" in DOCKERFILE
    assert service["image"] in (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    for text in re.findall(
        r"exec molink molink (\w+)", (FOLDER / "compose.yaml").read_text("utf-8")
    ):
        check_command([text, "1234-5678"])


def test_kubernetes() -> None:
    job = load("kubernetes.yaml")
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_command(container["args"])
    assert f"USER {pod['securityContext']['runAsUser']}" in DOCKERFILE
    swarm = manifests.build("base")
    service = manifests.find(swarm, "Service", container["args"][2].removeprefix("http://"))
    assert service["spec"]["ports"][0]["port"] == 80
    (peer,) = (
        one for one in manifests.workloads(swarm) if one["metadata"]["name"] == "molink-peer"
    )
    (key,) = container["env"]
    assert key in manifests.container(peer)["env"]
    assert container["image"].partition(":")[0] == manifests.container(peer)["image"]


class ScriptedClient:
    """Replaces OpenAI's client: gives answers in turn, and records the requests."""

    def __init__(self, *answers: Sequence[tuple[str, str]] | str) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    def create(self, **body: Any) -> SimpleNamespace:
        self.asked.append({**body, "messages": list(body["messages"])})
        answer = self.answers.pop(0)
        calls = (
            None
            if isinstance(answer, str)
            else [
                SimpleNamespace(
                    id=f"c{n}", function=SimpleNamespace(name=name, arguments=arguments)
                )
                for n, (name, arguments) in enumerate(answer)
            ]
        )
        message = SimpleNamespace(
            content=answer if isinstance(answer, str) else None,
            tool_calls=calls,
            model_dump=lambda **_: {"role": "assistant"},
        )
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def test_the_agent_calls_until_it_can_answer() -> None:
    agent = load_script("agent")
    calls = [("measure_disk", '{"folder": "."}'), ("tell_time", ""), ("rm", "{}")]
    client = ScriptedClient(
        calls, [("measure_disk", '{"folder": '), ("tell_time", '{"x": 1}')], "Done"
    )
    assert agent.run_agent(client, "m", "Which disk is full?") == "Done"
    results = [one["content"] for one in client.asked[-1]["messages"] if one["role"] == "tool"]
    assert re.fullmatch(r"\d+% of \d+ GB", results[0])
    assert re.match(r"\d{4}-\d\d-\d\dT", results[1])
    assert [text.startswith("error: ") for text in results] == [False, False, True, True, True]
    endless = ScriptedClient(*[[("tell_time", "")]] * agent.MAX_ROUNDS)
    assert "no answer" in agent.run_agent(endless, "m", "?")


def test_a_batch_goes_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": 3, "text": "a"}\n[]\n{"prompt": 4, "te', encoding="utf-8")
    batch = load_script("batch")
    assert batch.read_done(path) == {3}
    assert batch.read_done(tmp_path / "none") == set()
