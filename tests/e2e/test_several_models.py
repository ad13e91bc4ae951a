"""Two models of a swarm file on three PCs: one of them twice, or stopped; a PC is lost."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.local_swarm import NAMES, LocalSwarm
from tests.support.models import MakeModel
from tests.support.processes import Tools

FILE = """
[[models]]
model = "alpha"
pcs = ["second", "third"]
dtype = "f32"

[[models]]
model = "beta"
dtype = "f32"
"""


class TwoModels:
    """The swarm, and the folder of its swarm file and models."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self.file = root / "swarm.toml"
        self.swarm = LocalSwarm(root, tools, ("--model", str(root / "alpha")))
        self.tools = tools
        self.clients: list[openai.OpenAI] = []

    def write(self, text: str) -> Path:
        self.file.write_text(text, encoding="utf-8")
        return self.file

    def apply(self, *options: str) -> tuple[int, str, str]:
        """Exit code and output."""
        return self.molink("apply", str(self.file), *options)

    def molink(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code and output of a command on the first PC."""
        done = self.tools.run_molink(self.swarm.root / "first", *arguments)
        return done.returncode, done.stdout, done.stderr

    def client(self, name: str) -> openai.OpenAI:
        client = self.tools.client(self.swarm.running[name].found().endpoints[0])
        self.clients.append(client)  # closed at the end: a connection may outlive its answer
        return client

    def where(self, name: str = "first") -> dict[str, set[str]]:
        """The PCs of each ready model."""
        status = self.swarm.status(name)
        names = {one["id"]: one["name"] for one in status.get("peers", ())}
        return {
            one["model"]: {names[stage["peer"]] for stage in one["stages"]}
            for one in status.get("pipelines", ())
            if one["ready"]
        }

    def until(self, condition: Any, name: str = "first") -> None:
        self.tools.wait_for(condition, self.swarm.running[name])


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, tools: type[Tools], make_model: MakeModel
) -> Iterator[TwoModels]:
    root = tmp_path_factory.mktemp("several")
    make_model(root / "alpha", "qwen2", 1)
    make_model(root / "beta", "qwen2", 2, max_position_embeddings=4096)
    place = TwoModels(root, tools)
    try:
        for name in NAMES:
            place.swarm.wait_led_by(name, "first", 3)
        yield place
    finally:
        for client in place.clients:
            client.close()
        place.swarm.stop()


def ask(client: openai.OpenAI, model: str) -> str:
    done = client.completions.create(model=model, prompt="Hello", temperature=0, max_tokens=8)
    return done.choices[0].text


def ready_at(place: TwoModels, name: str, model: str) -> bool:
    """Whether that PC can take a request for the model."""
    try:
        return bool(ask(place.client(name), model)) or True
    except (openai.APIStatusError, openai.APIConnectionError):
        return False


TWICE = """
[[models]]
model = "alpha"
dtype = "f32"

[[models]]
model = "beta"
dtype = "f32"
replicas = {}
"""


#: Impossible files, the line that the error names, and its reason.
REFUSED = (
    ('molink = ""\nreplica = 2\n', 2, "unknown key replica; available: models, molink"),
    ('[[models]]\nmodel = "alpha"\nreplicas = 2\nquantise = "int8"\n', 4, "unknown key quantise"),
    ('[[models]]\nmodel = "alpha"\n[[models]]\nmodel = "beta"\npcs = ["attic"]\n', 5, "no PC"),
    (
        "".join(f'[[models]]\nmodel = "{name}"\npcs = ["first"]\n' for name in ("alpha", "beta")),
        6,
        "beta: first is pinned to alpha too",
    ),
    (
        "".join(f'[[models]]\nmodel = "{name}"\n' for name in ("alpha", "beta", "gamma", "delta")),
        None,
        "the connected PCs have room for it, but not together with",
    ),
)


def test_what_cannot_be_is_refused_whole(place: TwoModels) -> None:
    for name in ("gamma", "delta"):
        shutil.copytree(place.file.parent / "alpha", place.file.parent / name)

    def shown() -> list[Any]:
        status = place.swarm.status("first")
        return [status["models"], [(one["id"], one["epoch"]) for one in status["pipelines"]]]

    before = shown()
    for text, line, why in REFUSED:
        place.write(text)
        code, _, said = place.apply()
        assert code != 0
        assert why in said
        assert f"swarm.toml, line {line or ''}" in said
        assert shown() == before


@pytest.mark.slow  # without processes: tests/swarm/controller/test_fleet.py
def test_a_second_model_has_replicas_and_is_stopped_alone(place: TwoModels) -> None:
    def stages(model: str) -> list[list[str]]:
        """The PCs of each of its ready pipelines."""
        return [
            [stage["peer"] for stage in one["stages"]]
            for one in place.swarm.status("first").get("pipelines", ())
            if one["ready"] and one["model"] == model
        ]

    alpha = list[list[str]]()
    for replicas, ready in ((1, 1), (3, 2)):
        place.write(TWICE.format(replicas))
        code, _, error = place.apply()
        assert code == 0, error
        place.until(lambda ready=ready: (len(stages("alpha")), len(stages("beta"))) == (1, ready))
        alpha = alpha or stages("alpha")
        assert stages("alpha") == alpha, "what serves was moved"
        used = [peer for ring in (*alpha, *stages("beta")) for peer in ring]
        assert len(set(used)) == len(used)
        if replicas > ready:  # the status says what the missing replicas lack
            place.until(lambda: "beta #3: " in place.swarm.status("first")["trouble"])
            assert "beta (2 of 3 replicas ready)" in place.swarm.molink("first", "status")

    # One of them is stopped: the other keeps serving, and the file's model stays desired.
    refused = place.molink("stop", "gamma")
    assert refused[0] != 0
    assert "the swarm has no model gamma; its models are alpha, beta" in refused[2]
    code, said, error = place.molink("stop", "beta")
    assert (code, "`molink apply`" in said) == (0, True), error
    place.until(lambda: not stages("beta"))
    assert stages("alpha") == alpha
    assert "alpha, beta (stopped)" in place.swarm.molink("first", "status")
    client = place.client("third")
    place.until(lambda: [one.id for one in client.models.list().data] == ["alpha"], "third")
    assert place.apply("--dry-run")[1].startswith("~ beta: served again")
    code, said, error = place.molink("run", "beta", "Hello?")
    assert code == 0, error
    assert said.strip()
    place.until(lambda: len(stages("beta")) == 2)
    assert stages("alpha") == alpha
    # All of them, and the file with them: a model that is run then is in no file.
    assert place.molink("stop")[0] == 0
    code, _, error = place.molink("run", str(place.file.parent / "alpha"), "Hello?")
    assert code == 0, error


def test_two_models_answer_from_every_pc_and_one_is_not_disturbed(place: TwoModels) -> None:
    before = place.swarm.status("first")
    place.write(FILE + '[models.layers]\nfirst = "1-99"\n')
    code, _, said = place.apply()
    assert code != 0
    assert "swarm.toml, line 11: beta: first with layers 1-99 names layers" in said
    assert place.swarm.status("first")["models"] == before["models"]

    place.write(FILE)
    code, said, _ = place.apply("--dry-run")
    assert code == 0
    assert "+ beta: 1 replica" in said
    assert "~ alpha: " in said
    assert [one["name"] for one in place.swarm.status("first")["models"]] == ["alpha"]
    code, said, error = place.apply()
    assert (code, "Applied" in said) == (0, True), error
    place.until(lambda: place.where().keys() == {"alpha", "beta"})
    assert place.where()["alpha"] <= {"second", "third"}
    assert place.where()["beta"] == {"first"}
    assert "Nothing to change" in place.apply()[1]

    answers: dict[str, set[str]] = {"alpha": set(), "beta": set()}
    for name in NAMES:
        client = place.client(name)
        place.until(lambda client=client: len(client.models.list().data) == 2, name)
        for model, texts in answers.items():
            texts.add(ask(client, model))
        with pytest.raises(openai.NotFoundError, match=r"alpha, beta|beta, alpha"):
            ask(client, "gamma")
    assert [len(texts) for texts in answers.values()] == [1, 1]
    assert answers["alpha"] != answers["beta"]

    client = place.client("third")
    endpoint = place.swarm.running["third"].found().endpoints[0]
    before = place.tools.metrics(endpoint)["molink_daemon_requests_submitted_total"]
    stream = client.completions.create(
        model="beta",
        prompt="Hello",
        temperature=0,
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = [next(stream) for _ in range(5)]
    place.swarm.kill("second")
    place.until(lambda: place.where().get("alpha") == {"third"})
    pieces += stream
    assert pieces[-1].choices[0].finish_reason == "length"
    after = place.tools.metrics(endpoint)["molink_daemon_requests_submitted_total"]
    assert after == before + 1, "it was submitted again"
    assert ask(place.client("first"), "alpha") == answers["alpha"].pop()


@pytest.mark.slow
def test_what_was_applied_outlives_a_restart(place: TwoModels) -> None:
    place.write(FILE)
    code, _, error = place.apply()
    assert code == 0, error
    place.until(lambda: place.where().keys() == {"alpha", "beta"})
    place.swarm.running.pop("first").stop()
    place.swarm.up()
    place.until(lambda: place.where().keys() == {"alpha", "beta"})
    place.until(lambda: ready_at(place, "first", "beta") and ready_at(place, "first", "alpha"))
    assert all(one["applied"] for one in place.swarm.status("first")["models"])


@pytest.mark.slow
def test_one_model_twice_and_once_again(place: TwoModels) -> None:
    place.write('[[models]]\nmodel = "beta"\ndtype = "f32"\nreplicas = 2\n')
    code, said, error = place.apply()
    assert code == 0, error
    assert said.splitlines()[:2] == ["- alpha is stopped", "~ beta: replicas 1 -> 2"]

    def stages() -> list[list[str]]:
        ready = [one for one in place.swarm.status("first").get("pipelines", ()) if one["ready"]]
        return [[stage["peer"] for stage in one["stages"]] for one in ready]

    place.until(lambda: len(stages()) == 2)
    first, second = stages()
    assert not set(first) & set(second)
    client = place.client("third")
    place.until(lambda: [one.id for one in client.models.list().data] == ["beta"], "third")
    streams = [
        client.completions.create(
            model="beta",
            prompt="Hello",
            temperature=0,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(2)
    ]
    for stream in streams:
        next(stream)

    def busy() -> list[int]:
        heads = [one["scheduler"] for one in place.swarm.status("first")["pipelines"]]
        return [0 if head is None else head["running"] for head in heads]

    place.until(lambda: busy() == [1, 1])
    place.write('[[models]]\nmodel = "beta"\ndtype = "f32"\n')
    assert place.apply()[0] == 0
    place.until(lambda: len(stages()) == 1)
    # The stream of the pipeline that ended continues on the other one.
    texts = ["".join(piece.choices[0].text for piece in stream) for stream in streams]
    assert texts[0] == texts[1]
    place.swarm.molink("first", "stop")
    place.until(lambda: not place.swarm.status("first").get("pipelines", True))
