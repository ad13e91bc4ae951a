"""The command line: help, one-line errors, exit codes, and finding the daemon."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import molink
from molink import errors
from molink.errors import ConnectionBroken, Unavailable
from molink.wire.messages.admin import InviteReply, RevokeReply, StatusRequest
from molinkd.cli import daemon_client
from molinkd.cli.demo import sample_command
from molinkd.cli.invitation_table import remaining_text, show_invitations
from molinkd.cli.main import run, use_utf8
from molinkd.peer.home import Home, RunFile
from molinkd.peer.launch import Launch
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.settings import MemoryShare


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path))
    monkeypatch.delenv("MOLINK_TOKEN", raising=False)
    monkeypatch.setenv("MOLINK_DISCOVERY", "false")  # no discovery on the real network
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["--help"], ["up", "--help"], ["bench", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert "Usage" in capsys.readouterr().out


def test_no_arguments_list_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    out = capsys.readouterr().out
    verbs = "up join demo chat status leave invite revoke un-revoke bench simulate"
    for verb in verbs.split():
        assert f" {verb} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"molink {molink.__version__}\n"


def test_quantize_and_memory_reach_the_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches: list[Launch] = []
    monkeypatch.setattr(
        "molinkd.cli.daemon_start.run_daemon", lambda launch, _: launches.append(launch)
    )
    assert run(["up", "--quantize", "nf4", "--memory", "80%", "--max-model-len", "4096"]) == 0
    (launch,) = launches
    assert launch.settings.quantize == "nf4"
    assert launch.settings.memory == MemoryShare(80.0)
    assert launch.settings.max_model_len == 4096
    assert run(["up", "--quantize", "int4"]) == 2
    assert run(["up", "--max-model-len", "0"]) == 2


@pytest.mark.parametrize("verb", ["up", "join"])
def test_a_public_endpoint_without_a_key_is_rejected_first(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def never(*_: object) -> None:
        raise AssertionError(verb)

    monkeypatch.setattr("molinkd.cli.daemon_start.run_daemon", never)
    monkeypatch.setattr("molinkd.cli.daemon_start.resolve_token", never)
    home = tmp_path / "new"
    assert run([verb, "--api-host", "0.0.0.0", "--home", str(home)]) == 2
    assert "set one with --api-key" in capsys.readouterr().err
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["status"], 6, "molink is not running here"),
        (["top"], 6, "molink is not running here"),
        (["top", "--json"], 6, "molink is not running here"),
        (["chat", "hi"], 6, "molink is not running here"),
        (["invite"], 6, "molink is not running here"),
        (["invite", "--ttl", "-1"], 2, "--ttl"),
        (["invite", "--uses", "0"], 2, "--uses"),
        (["invite", "--list"], 6, "molink is not running here"),
        (["invite", "--end", "x"], 6, "molink is not running here"),
        (["invite", "--list", "--end", "x"], 2, "--list and --end"),
        (["revoke", "pc", "--yes"], 6, "molink is not running here"),
        (["un-revoke", "pc"], 6, "molink is not running here"),
        (["leave"], 2, "not in a swarm"),
        (["join"], 2, "in no swarm"),
        (["join", ""], 2, "token is empty"),
        (["join", "[::1]:0"], 2, "0 is not a valid port"),
        (["join", "molink-AAAA"], 3, "not a valid join token"),
        (["up", "--stage", "0:4"], 2, "A-B, such as 1-12, not '0:4'"),
        (["up", "--memory", "much"], 2, "size"),
        (["up", "--memory", "12"], 2, "memory: 12 bytes? Write 12GiB"),
        (["up", "--memory", "150%"], 2, "the command line: memory: a share of memory is above 0%"),
        (["chat", "--url", "foo", "hi"], 2, "--url must be a URL"),
        (["up", "--model", "no such model!"], 5, "no such model!"),
        (["up", "--worker-ports", "5"], 2, "worker_ports"),
        (["up", "--advertise", "foo:1:2"], 2, "not 'foo:1:2'"),
        (["up", "--advertise", "foo:1"], 2, "without ports, not 'foo:1'"),
        (["status", "--home", "elsewhere"], 6, "`molink up --home "),
    ],
)
def test_errors_are_one_clear_line(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


def test_a_stopped_leader_is_not_running(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its coordinator, which a command asks where no daemon runs, doesn't answer."""

    def no_answer(*_: object) -> None:
        raise daemon_client.DaemonNotResponding("the coordinator doesn't answer")

    MembershipRecord(swarm="s", coordinator_key="k", addresses=()).save(home / "swarm.json")
    monkeypatch.setattr(daemon_client, "request_coordinator", no_answer)
    assert run(["invite"]) == 6
    assert "molink is not running here" in capsys.readouterr().err


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Arguments of the daemons that commands start."""
    launches: list[Launch] = []
    monkeypatch.setattr(
        "molinkd.cli.daemon_start.run_daemon", lambda launch, _: launches.append(launch)
    )
    return launches


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_token_may_be_typed_or_piped(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr("typer.prompt", lambda text, hide_input: f"{text} {hide_input}")
    monkeypatch.setattr(sys, "stdin", Terminal(" molink-piped \n"))
    assert run(["join", "-"]) == 0
    assert run(["join"]) == 0
    MembershipRecord(swarm="s", coordinator_key="k", addresses=()).save(home / "swarm.json")
    assert run(["join"]) == 0, "a member needs none"
    assert [launch.token for launch in launches] == ["molink-piped", "Join token True", None]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows hides it from others")
def test_a_token_is_hidden_from_the_command_line(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    arguments = ["join", "--name", "molink-x", "molink-x", "--stage", "none"]
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "molinkd", *arguments])
    run(arguments)
    ((program, line, environment),) = calls
    assert program == line[0] == sys.executable
    assert line[1:] == ["-m", "molinkd", "join", "--name", "molink-x", "--stage", "none"]
    assert environment["MOLINK_TOKEN"] == "molink-x"
    # The token then comes from the environment.
    calls.clear()
    monkeypatch.setattr(sys, "orig_argv", line)
    monkeypatch.setenv("MOLINK_TOKEN", "molink-y")
    launches.clear()
    assert run(line[3:]) == 0
    assert (calls, [launch.token for launch in launches]) == ([], ["molink-y"])


def test_a_token_has_instructions_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = InviteReply(ref=0, id="molink-ab", token="molink-token")
    monkeypatch.setattr(daemon_client, "create_invitation", lambda *_: made)
    assert run(["invite"]) == 0
    assert capsys.readouterr().out == "molink-token\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(["invite", "--uses", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("To add up to 2 PCs, install molink there and run this in its folder:")
    assert "  .venv/bin/molink join molink-token\n" in out


def test_invitations_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show_invitations([])
    assert "There are no invitations" in capsys.readouterr().out
    shown = {"creator": {"peer": "p", "name": "first"}, "created": 1.8e9, "uses": 2, "left": 1}
    used = [{"peer": "q", "name": "tv\x1b", "at": 1.8e9}]
    show_invitations(
        [
            {"id": "ab", "expires": 0, "used": used, **shown},
            {"id": "cd", "expires": 2**60, "used": [], **shown},
        ]
    )
    out = " ".join(capsys.readouterr().out.split())
    for text in ("ab", "never", "1 of 2", "first", "tv\\x1b", "nobody", "unix time"):
        assert text in out
    assert "\x1b" not in out
    assert remaining_text(RevokeReply(ref=0)) == ""
    ended = RevokeReply(ref=0, kept_peers=("a", "b"))
    assert remaining_text(ended) == " PCs that joined with the same invitation stay: a, b."
    ended = RevokeReply(ref=0, kept_peers=("a",), ended_peers=tuple("bcdefghijkl"))
    assert remaining_text(ended) == (
        " PCs that it let in are out too: b, c, d, e, f, g, h, i, 3 more. "
        "PCs that joined with the same invitation stay: a."
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "No such command 'nonsense' (see `molink --help`)"),
        (["lst"], "No such command 'lst'. Did you mean 'list'? (see `molink --help`)"),
        (["up", "--bogus"], "No such option: --bogus"),
        (["approve", "1", "2"], "(see `molink approve --help`)"),
        (["demo", "--peers", "0"], "Invalid value for '--peers'"),
    ],
)
def test_usage_errors_are_one_line_too(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("verb", ["simulate", "up"])
def test_invalid_choices_are_explained(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--preemption-mode", "nonsense"]) == 2
    output = capsys.readouterr().err
    assert "'nonsense' is not one of 'recompute', 'reactive-swap', 'proactive-swap'" in output
    assert "Value error" not in output


def test_a_broken_model_is_reported_before_the_start(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert run(["up", "--model", str(folder)]) == 5
    assert "config.json" in capsys.readouterr().err
    assert not (home / "coordinator").exists()


def test_a_daemon_takes_precedence_over_a_demo(home: Path) -> None:
    place = Home(home)
    assert daemon_client.find_daemon(place) is None
    with pytest.raises(Unavailable):
        daemon_client.require_daemon(home)
    demo = place.demo_home(2)
    demo.create_folders()
    note = RunFile.of_this_process(1, "http://a", ("http://a", "http://b"))
    note.save_file(demo.run_file)
    found = daemon_client.require_daemon(home)
    assert found.is_demo
    assert found.home == demo.demo_peer(1)
    assert found.endpoints == ("http://a", "http://b")
    RunFile.of_this_process(2, "http://live").save_file(place.run_file)
    found = daemon_client.require_daemon(home)
    assert not found.is_demo
    assert found.endpoints == ("http://live",)


def test_an_unresponsive_daemon_times_out(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_client, "CONNECT_TIMEOUT_S", 0.2)
    place = Home(home)
    place.create_folders()
    # Like a suspended process: the kernel accepts connections, but nothing replies.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        RunFile.of_this_process(silent.getsockname()[1], "http://a").save_file(place.run_file)
        assert run(["status"]) == 6
    said = capsys.readouterr().err
    assert "did not respond within 0.2 s" in said
    assert f"process {os.getpid()}" in said


def test_a_dropped_status_request_is_retried(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation drops connections."""
    asked: list[object] = []

    def ask(
        found: daemon_client.RunningDaemon, message: StatusRequest
    ) -> tuple[StatusRequest, bytes]:
        asked.append(found)
        if len(asked) == 1:
            raise ConnectionBroken("broke")
        return message, b'{"peers": []}'

    monkeypatch.setattr(daemon_client, "send_request", ask)
    found = daemon_client.RunningDaemon(Home(home), RunFile.of_this_process(1, "http://a"))
    assert daemon_client.fetch_status(found) == {"peers": []}
    assert asked == [found, found]


def test_status_exit_code_is_readiness(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = {"id": "p1", "model": "m", "ready": False}
    state = {"swarm": "s", "coordinator": {"state": "running"}, "pipelines": [pipeline]}
    slept: list[float] = []

    def wait(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            RunFile.of_this_process(1, "http://a").save_file(Home(home).create_folders().run_file)
        else:
            pipeline["ready"] = True

    def ask(_: object, message: StatusRequest) -> tuple[StatusRequest, bytes]:
        return message, json.dumps(state).encode()

    monkeypatch.setattr("molinkd.cli.daemon_client.time.sleep", wait)
    monkeypatch.setattr(daemon_client, "send_request", ask)
    assert run(["status"]) == 6
    assert (run(["status", "--wait", "60"]), len(slept)) == (0, 2), "for molink, then for a model"
    assert run(["status", "--json"]) == 0
    pipeline["ready"] = False
    capsys.readouterr()
    assert run(["status", "--json"]) == 6
    assert json.loads(capsys.readouterr().out) == state


READY = {
    "swarm": "s",
    "coordinator": {"state": "running"},
    "pipelines": [{"id": "p1", "model": "m", "ready": True}],
}
#: Packages and modules that only the daemon, or a few commands, need.
HEAVY = {
    "aiohttp",
    "huggingface_hub",
    "jinja2",
    "molink.checkpoint",
    "molink.link",
    "molink.scheduler",
    "molink.swarm.placement",
    "molinkd.api",
    "molinkd.peer.launch",
    "molinkd.peer.settings",
    "textual",
    "tokenizers",
    "torch",
    "transformers",
}


@pytest.mark.parametrize(
    ("commands", "excluded"),
    [
        ([["--help"], ["--version"]], {"asyncio", "msgspec", "pydantic", "rich", "zmq"}),
        ([["status"]], set()),
    ],
)
def test_commands_start_without_heavy_imports(
    commands: list[list[str]], excluded: set[str], home: Path
) -> None:
    RunFile.of_this_process(1, "http://a").save_file(Home(home).create_folders().run_file)
    code = (
        "import json, sys; from molinkd.cli.main import run; commands = json.loads(sys.argv[1])\n"
        "if '--help' not in commands[0]:\n"
        "    from molinkd.cli import daemon_client\n"
        "    daemon_client.CONNECT_TIMEOUT_S = 0.1\n"
        "    assert [run(one) for one in commands] == [6] * len(commands), 'nothing listens'\n"
        "    daemon_client.send_request = lambda *_: (None, sys.argv[2].encode())\n"
        "assert [run(one) for one in commands] == [0] * len(commands)\n"
        "found = sorted(set(json.loads(sys.argv[3])) & set(sys.modules))\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    given = [json.dumps(commands), json.dumps(READY), json.dumps([*HEAVY, *excluded])]
    root = str(Path(molink.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, *given], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_daemon_never_imports_torch() -> None:
    code = (
        "import sys; import molinkd.peer.main; import molinkd.cli.demo;"
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = str(Path(molink.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


KINDS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.MolinkError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_ends_with_its_exit_code(
    kind: type[errors.MolinkError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes of docs/settings.md, which tests/test_errors.py compares with these classes."""

    def fail(*_: object) -> None:
        raise kind("it failed")

    monkeypatch.setattr(daemon_client, "require_daemon", fail)
    assert run(["status"]) == kind.exit_code


def test_errors_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Unavailable("\x1b[2J")

    monkeypatch.setattr(daemon_client, "require_daemon", fail)
    assert run(["status"]) == 6
    assert capsys.readouterr().err == "error: \\x1b[2J\n"


def test_daemon_events_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from molinkd.cli.daemon_console import DaemonConsole
    from molinkd.cli.demo import DemoConsole
    from molinkd.peer.launch import (
        ModelReadinessChangedEvent,
        ProblemReportedEvent,
        StageStatusChangedEvent,
    )

    evil = "\x1b]0;PWNED\x07[red]"
    for event in (
        StageStatusChangedEvent(text=evil),
        ProblemReportedEvent(text=evil),
        ModelReadinessChangedEvent(model=evil, ready=True),
    ):
        DaemonConsole().show_event(event)
        DemoConsole().show_event(1, event)
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert "PWNED" in text
        assert not set("\x1b\x07") & set(text)


def test_the_demo_says_whose_endpoint_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    from molinkd.cli.demo import DemoConsole
    from molinkd.peer.launch import ModelReadinessChangedEvent, StageStatusChangedEvent

    console = DemoConsole()
    console.show_event(1, StageStatusChangedEvent(text="stage 1 (layers 1-3) ready"))
    console.show_event(1, ModelReadinessChangedEvent(model="m", ready=True))
    assert capsys.readouterr().err.splitlines() == [
        "peer 1: stage 1 (layers 1-3) ready",
        "peer 1: endpoint ready, stage 1 (layers 1-3) ready",
    ]


def test_pipes_get_utf8() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="cp1252")
    use_utf8((stream, None))
    print("日本 …", file=stream, flush=True)
    assert raw.getvalue().decode("utf-8").strip() == "日本 …"


def test_the_sample_suits_the_shell() -> None:
    typed = "`x/molink {}`".format
    assert (
        sample_command("http://u/v1", typed, "win32").strip() == 'x/molink chat "What is molink?"'
    )
    curl = sample_command("http://u/v1", typed, "linux")
    assert json.loads(curl.split("'")[-2])["stream"] is True
