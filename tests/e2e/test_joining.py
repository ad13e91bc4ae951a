"""PCs that join by a token: separate homes, no shared path."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.support.models import MakeModel
from tests.support.processes import START_S, Process, Tools

MESSAGES = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    """A random small model that only the PC of ``molink up`` has."""
    return make_model(
        tmp_path_factory.mktemp("models") / "tiny",
        "qwen2",
        num_hidden_layers=6,
        tie_word_embeddings=True,
        max_shard_size="200KB",
    )


class Trio:
    """``up`` with the model, a joiner with a stage, a joiner without."""

    def __init__(self, root: Path, model: Path, tools: type[Tools]) -> None:
        self.root = root
        local = tools.local_options
        self.up = tools.Process(
            root / "up",
            [
                *("up", "--model", str(model), "--dtype", "f32", "--min-peers", "2"),
                *("--coordinator-port", "0", "--name", "first"),
                *local(),
            ],
        )
        self.started = [self.up]
        found = self.up.found()
        tools.wait_for(lambda: found.home.membership.exists(), self.up)
        token = tools.run_molink(root / "up", "invite", "--uses", "3").stdout.strip()
        assert token.startswith("molink-"), self.up.output
        self.token = token
        (root / "worker").mkdir()
        (root / "worker" / "config.toml").write_text("replicate_models = false\n", encoding="utf-8")
        self.worker = tools.Process(
            root / "worker", ["join", token, "--name", "second", *local("--stage", "auto")]
        )
        self.started.append(self.worker)
        self.guest = tools.Process(
            root / "guest", ["join", token, "--name", "third", *local("--stage", "none")]
        )
        self.started.append(self.guest)

    def stop(self) -> None:
        for process in reversed(self.started):
            process.stop()


@pytest.fixture(scope="module")
def trio(
    tmp_path_factory: pytest.TempPathFactory, model: Path, tools: type[Tools]
) -> Iterator[Trio]:
    root = tmp_path_factory.mktemp("trio")
    trio = Trio(root, model, tools)
    try:
        trio.up.wait_ready()
        for process in trio.started:
            client = tools.client(process.found().endpoints[0])

            def ready(client: openai.OpenAI = client) -> bool:
                return bool(list(client.models.list()))

            tools.wait_for(ready, process)
        yield trio
    finally:
        trio.stop()


def answer(tools: type[Tools], process: Process) -> str:
    client = tools.client(process.found().endpoints[0])
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=24
    )
    return reply.choices[0].message.content or ""


def test_joiners_need_nothing_but_the_token(trio: Trio, tools: type[Tools]) -> None:
    status = trio.up.wait_ready()
    stages = status["pipelines"][0]["stages"]
    names = {peer["id"]: peer["name"] for peer in status["peers"]}
    assert sorted(names[stage["peer"]] for stage in stages) == ["first", "second"]
    (none,) = [peer for peer in status["peers"] if peer["name"] == "third"]
    assert none["workers"] == []
    # The same greedy text from all three, on each stage's PC.
    texts = [answer(tools, process) for process in trio.started]
    assert len(set(texts)) == 1


def test_only_what_is_needed_travels(trio: Trio, tools: type[Tools], model: Path) -> None:
    status = trio.up.wait_ready()
    (worker,) = [p for p in status["peers"] if p["name"] == "second"]
    first, last = worker["workers"][0]["layers"]
    (folder,) = (trio.root / "worker" / "models").iterdir()
    layers = {f"layer-{layer:04d}.safetensors" for layer in range(first, last)}
    ends = ({"embed.safetensors"}, {"embed.safetensors", "final.safetensors"})
    got = {path.name for path in folder.glob("*.safetensors")}
    assert got == layers | ends[last == 6]
    (guest,) = (trio.root / "guest" / "models").iterdir()
    assert not list(guest.glob("*.safetensors"))
    assert json.loads((guest / "config.json").read_text(encoding="utf-8"))
    # The joiners do not read the model's folder.
    for home in ("worker", "guest"):
        for path in (trio.root / home).rglob("*.json"):
            assert str(model) not in path.read_text(encoding="utf-8")


def test_secrets_are_for_their_owner_alone(trio: Trio) -> None:
    if sys.platform == "win32":
        pytest.skip("POSIX modes")
    for path in trio.root.rglob("*.key"):
        assert path.stat().st_mode & 0o077 == 0
    family = [process for one in trio.started for process in one.family()]
    lines = [
        " ".join(process.cmdline())
        for process in family
        if process.status() != psutil.STATUS_ZOMBIE
    ]
    secret = (trio.root / "up" / "peer.key").read_text(encoding="utf-8").strip()
    assert any("join" in line for line in lines)
    for hidden in (secret, trio.token):
        assert not any(hidden in line for line in lines)


def test_a_token_that_was_tampered_with(trio: Trio, tools: type[Tools], tmp_path: Path) -> None:
    broken = trio.token[:-3] + "xyz"
    done = tools.run_molink(tmp_path, "join", broken, *tools.local_options())
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert "not a valid join token" in done.stderr


def test_a_token_that_expires(trio: Trio, tools: type[Tools], tmp_path: Path) -> None:
    token = tools.run_molink(trio.root / "up", "invite", "--ttl", "0.0002").stdout.strip()
    tools.wait_for(lambda: _expires(tools, tmp_path, token), trio.up)


def _expires(tools: type[Tools], home: Path, token: str) -> bool:
    from molink.errors import TokenError
    from molinkd.peer.membership.membership_record import parse_token

    try:
        parse_token(token)
    except TokenError:
        done = tools.run_molink(home, "join", token, *tools.local_options())
        assert (done.returncode, "expired" in done.stderr) == (3, True), done.stderr
        return True
    return False


def test_a_token_of_another_swarm(trio: Trio, tools: type[Tools], tmp_path: Path) -> None:
    """The coordinator at its address has another key."""
    import msgspec

    from molink.wire.sockets.key_pair import KeyPair
    from molinkd.peer.membership.membership_record import parse_token

    other = msgspec.structs.replace(
        parse_token(trio.token), coordinator_key=KeyPair.generate().public
    )
    done = tools.run_molink(tmp_path, "join", str(other), *tools.local_options())
    assert done.returncode == 3, done.stderr
    assert "another swarm" in done.stderr
    unknown = msgspec.structs.replace(parse_token(trio.token), secret_key=KeyPair.generate().secret)
    done = tools.run_molink(tmp_path, "join", str(unknown), *tools.local_options())
    assert done.returncode == 3, done.stderr


def test_a_member_of_one_swarm_cannot_join_another(trio: Trio, tools: type[Tools]) -> None:
    done = tools.run_molink(trio.root / "guest", "join", trio.token, *tools.local_options())
    assert done.returncode == 2
    assert "another molink daemon" in done.stderr


def test_leaving(trio: Trio, tools: type[Tools], tmp_path: Path) -> None:
    home = tmp_path / "leaver"
    leaver = tools.Process(
        home, ["join", trio.token, "--name", "second", *tools.local_options("--stage", "none")]
    )
    try:
        leaver.found()
        tools.wait_for(lambda: "second-2" in _names(trio), leaver)
        assert [one["name"] for one in leaver.status()["peers"]] == _names(trio)
        done = tools.run_molink(home, "leave")
        assert done.returncode == 0, done.stderr
        assert leaver.process.wait(START_S) == 0, leaver.output
        assert sorted(_names(trio)) == ["first", "second", "third"]
        assert tools.run_molink(home, "leave").returncode == 2
    finally:
        leaver.stop()


def test_revoking(trio: Trio, tools: type[Tools], tmp_path: Path) -> None:
    """It shares its host name with another member, which joined before."""
    home, first = tmp_path / "guest", trio.root / "up"
    token = tools.run_molink(first, "invite").stdout.strip()
    options = ["--name", "second", *tools.local_options("--stage", "none")]
    guest = tools.Process(home, ["join", token, *options])
    again = None
    try:
        guest.found()
        tools.wait_for(lambda: "second-3" in _names(trio), guest)
        done = tools.run_molink(home, "revoke", "second", "--yes")
        assert (done.returncode, "only an owner of the swarm" in done.stderr) == (7, True)
        assert "second-3" in tools.run_molink(first, "invite", "--list").stdout
        done = tools.run_molink(first, "revoke", "second-3")
        assert (done.returncode, "--yes" in done.stderr) == (2, True), "not by mistake"
        # The first PC makes the second one an owner, which removes the other one of its name.
        done = tools.run_molink(first, "add-owner", "second")
        assert (done.returncode, "is an owner now" in done.stdout) == (0, True), done.stderr
        revoke = (trio.root / "worker", "revoke", "second-3", "--yes")

        def is_revoked() -> bool:
            # It was revoked already if the reply to an earlier request was lost.
            done = tools.run_molink(*revoke)
            return done.returncode == 0 or "no other member second-3" in done.stderr

        tools.wait_for(is_revoked, trio.up)
        assert sorted(_names(trio)) == ["first", "second", "third"]
        done = tools.run_molink(first, "revoke", "second-3", "--yes")
        assert "no other member second-3" in done.stderr
        # It is notified, exits, and can join neither with its own key nor with a new one.
        assert guest.process.wait(START_S) == 9, guest.output
        assert "was removed from swarm" in guest.output
        done = tools.run_molink(tmp_path / "new", "join", token, *options)
        assert (done.returncode, "was revoked" in done.stderr) == (3, True), done.stderr
        assert "second-3" not in tools.run_molink(first, "invite", "--list").stdout
        done = tools.run_molink(first, "un-revoke", "second-3")
        assert done.returncode == 0, done.stderr
        again = tools.Process(home, ["join", *options])
        tools.wait_for(lambda: "online" in _states(trio, "second-3"), again)
        tools.wait_for(lambda: "second-3 is in swarm" in again.output, again)
        again.stop()
        options[1] = "renamed"
        again = tools.Process(home, ["join", *options])
        tools.wait_for(lambda: "online" in _states(trio, "renamed"), again)
    finally:
        guest.stop()
        if again is not None:
            again.stop()


def test_dissolving(tools: type[Tools], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    no_stage = tools.local_options("--stage", "none", "--coordinator-port", "0")
    up = tools.Process(first, ["up", *no_stage])
    started = [up]
    try:
        tools.wait_for(lambda: up.found().home.membership.exists(), up)
        token = tools.run_molink(first, "invite").stdout.strip()
        guest = tools.Process(second, ["join", token, *no_stage])
        started.append(guest)
        guest.found()
        assert tools.run_molink(first, "leave").returncode == 2, "not by mistake"
        done = tools.run_molink(second, "leave", "--dissolve")
        assert (done.returncode, "only the PC that created" in done.stderr) == (2, True)
        # Only connected PCs are told.
        tools.wait_for(
            lambda: [peer["state"] for peer in up.status()["peers"]] == ["online"] * 2, up
        )
        done = tools.run_molink(first, "leave", "--dissolve", "--yes")
        assert (done.returncode, "Not told" in done.stdout) == (0, False), done.stdout
        assert up.process.wait(START_S) == 0, up.output
        assert guest.process.wait(START_S) == 9, guest.output
        assert "was removed from swarm" in guest.output
        assert "not in a swarm" in tools.run_molink(first, "leave").stderr
        # A restart does not create a swarm of its own.
        done = tools.run_molink(second, "join", "--background")
        assert (done.returncode, "was removed from swarm" in done.stderr) == (9, True), done.stdout
        assert "is in swarm" not in done.stdout
    finally:
        for process in started:
            process.stop()


def _states(trio: Trio, name: str) -> list[str]:
    return [peer["state"] for peer in trio.up.status()["peers"] if peer["name"] == name]


def _names(trio: Trio) -> list[str]:
    return [peer["name"] for peer in trio.up.status()["peers"]]


def test_a_killed_daemon_leaves_nothing_behind(trio: Trio, tools: type[Tools]) -> None:
    """The first PC's daemon. This test runs last, since the others need all three PCs."""
    family = trio.up.family()
    assert len(family) >= 3, trio.up.output
    (daemon,) = [p["daemon_pid"] for p in trio.up.status()["peers"] if p["name"] == "first"]
    psutil.Process(daemon).send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    assert tools.alive(family) == []
    # The home can be used again at once; files of the dead daemon are ignored.
    assert tools.run_molink(trio.root / "up", "status").returncode == 6
