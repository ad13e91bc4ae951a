"""Three PCs share a model of the hub: what each downloads, and a PC that alters a shard."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fake_hub import REPOSITORY, FakeHub, serving
from tests.support.models import MakeModel
from tests.support.processes import Process, Tools
from tests.support.shards import shard_name, write_shards

PROMPT = [{"role": "user", "content": "Who has the layers?"}]
LAYERS = 4
ENDS, *OF_LAYERS = (shard_name(number, LAYERS + 1) for number in range(LAYERS + 1))
#: Larger than the header of a shard.
HEAD = 5000

Start = Callable[..., Process]


@pytest.fixture
def hub(tmp_path: Path, make_model: MakeModel) -> Iterator[FakeHub]:
    model = make_model(tmp_path / "model", "qwen2", 1, num_hidden_layers=LAYERS)
    with serving(write_shards(model)) as made:
        yield made


@pytest.fixture
def start(tmp_path: Path, tools: type[Tools], hub: FakeHub) -> Iterator[Start]:
    """Start a PC by its name, which is also its user agent at the hub."""
    options = tools.local_options("--coordinator-port", "0")
    with ExitStack() as stack:

        def one(name: str, *arguments: str, module: str = "molinkd") -> Process:
            given = [*arguments, "--name", name, *options]
            variables = {
                "MOLINK_REPLICATE_MODELS": "false",
                "HF_ENDPOINT": hub.url,
                "HF_HUB_CACHE": str(tmp_path / f"cache-{name}"),
                "HF_TOKEN": f"hf_{name}",
            }
            process = Process(tmp_path / name, given, module, variables)
            stack.callback(process.stop)
            tools.wait_for(process.home.membership.exists, process)
            return process

        yield one


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_takes_its_shards(
    tmp_path: Path, tools: type[Tools], hub: FakeHub, start: Start
) -> None:
    def invite() -> str:
        return tools.run_molink(tmp_path / "a", "invite").stdout.strip()

    def answer(process: Process) -> str:
        client = tools.client(process.found().endpoints[0])
        made = client.chat.completions.create(
            model="some-model", messages=PROMPT, temperature=0, max_tokens=20
        )
        return made.choices[0].message.content or ""

    def took(name: str) -> dict[str, int]:
        found = {file: hub.sent[f"Bearer hf_{name}", file] for file in (ENDS, *OF_LAYERS)}
        return {file: nbytes for file, nbytes in found.items() if nbytes >= HEAD}

    def here(process: Process) -> set[str]:
        return {path.name for path in process.home.models.rglob("*.safetensors")}

    size = {path.name: path.stat().st_size for path in hub.folder.glob("*.safetensors")}
    assert min(size.values()) > 2 * HEAD
    bring = ["--model", REPOSITORY, "--dtype", "f32", "--min-peers", "3"]
    a = start("a", "up", *bring, "--stage", "1-2")
    b = start("b", "join", invite(), "--stage", "3")
    c = start("c", "join", invite(), "--stage", "4")
    a.wait_ready()
    shards = {"a": {ENDS, *OF_LAYERS[:2]}, "b": {OF_LAYERS[2]}, "c": {ENDS, OF_LAYERS[3]}}
    for name, process in (("a", a), ("b", b), ("c", c)):
        assert here(process) == shards[name]
        # Two PCs hold the ends: the second one may have fetched them from the first.
        assert shards[name] - took(name).keys() <= ({ENDS} if name in "ac" else set())
        assert took(name).keys() <= shards[name]
        for file, nbytes in took(name).items():
            # The model's provider has read the headers, too.
            assert size[file] <= nbytes < size[file] + (HEAD if name == "a" else 1)
    assert ENDS in {**took("a"), **took("c")}
    expected = answer(b)

    # A PC that has a layer's shard alters it, and holds no layers any more.
    b.stop()
    tools.wait_for(lambda: "layers 3 yet: the hub has them" in a.status().get("files", ""), a)
    start("b", "join", "--stage", "none", module="tests.support.altering_peer")
    tools.wait_for(lambda: "together they hold all layers" in a.status().get("files", ""), a)
    d = start("d", "join", invite(), "--stage", "3")
    d.wait_ready()
    (liar,) = d.status()["banned_peers"]
    assert (liar["name"], liar["banned_by"]) == ("b", "this PC, as a source of models")
    assert f"{OF_LAYERS[2]} has a wrong SHA-256" in liar["reason"]
    assert took("d") == {OF_LAYERS[2]: size[OF_LAYERS[2]]}
    (stored,) = d.home.models.rglob("*.safetensors")
    assert stored.read_bytes() == (hub.folder / stored.name).read_bytes()
    assert answer(d) == expected
