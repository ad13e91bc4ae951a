"""The PC with all files is gone: the others continue with the files of their stages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from molink.errors import MolinkError
from molinkd.cli import daemon_client as local_daemon
from tests.support.models import MakeModel
from tests.support.processes import Process, Tools

PROMPT = [{"role": "user", "content": "Who has the layers?"}]
LAYERS = 6
#: No replication, short timeouts, and no standby workers.
VARIABLES = {
    "MOLINK_REPLICATE_MODELS": "false",
    "MOLINK_PIPELINE_WAIT_TIMEOUT": "2",
    "MOLINK_STANDBY_WORKER": "false",
}

Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, tools: type[Tools]) -> Iterator[Start]:
    options = tools.local_options("--coordinator-port", "0")
    with ExitStack() as stack:

        def one(name: str, *arguments: str) -> Process:
            given = [*arguments, "--name", name, *options]
            process = Process(tmp_path / name, given, variables=VARIABLES)
            stack.callback(process.stop)
            tools.wait_for(process.home.membership.exists, process)
            return process

        yield one


def status(process: Process) -> dict[str, Any]:
    """The status by that PC; empty while it is unavailable."""
    found = local_daemon.find_daemon(process.home)
    try:
        return {} if found is None else local_daemon.fetch_status(found)
    except MolinkError:
        return {}


def ready(process: Process) -> bool:
    return any(one["ready"] for one in status(process).get("pipelines", ()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_owner_leaves(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, start: Start
) -> None:
    folder = make_model(tmp_path / "brought", "qwen2", 1, num_hidden_layers=LAYERS)

    def invite(name: str) -> str:
        return tools.run_molink(tmp_path / name, "invite").stdout.strip()

    def answer(process: Process) -> str:
        client = tools.client(process.found().endpoints[0])
        made = client.chat.completions.create(
            model="brought", messages=PROMPT, temperature=0, max_tokens=20
        )
        return made.choices[0].message.content or ""

    bring = ["--model", str(folder), "--dtype", "f32", "--min-peers", "2", "--stage", "none"]
    owner = start("owner", "up", *bring)
    left = start("left", "join", invite("owner"), "--stage", "1-3")
    right = start("right", "join", invite("owner"), "--stage", "4-6")
    tools.wait_for(lambda: ready(left), left)
    expected = answer(left)
    for gone in (owner, right):
        gone.process.kill()
        gone.stop()
    # No PC has its layers: the status says so at once and blames no peer.
    late = start("late", "join", invite("left"), "--stage", "4-6")
    missing = "no connected PC has the files of layers 4-6 and final of brought"
    tools.wait_for(lambda: missing in str(status(late).get("pipelines")), late)
    tools.wait_for(lambda: "layers 4-6" in status(left).get("files", ""), left)
    with pytest.raises(openai.APIStatusError, match=missing):
        answer(left)
    # A PC that has them joins, without a stage.
    start("right", "join", "--stage", "none")
    tools.wait_for(lambda: ready(late), late)
    assert answer(late) == expected
    assert "together they hold all layers" in status(late)["files"]
