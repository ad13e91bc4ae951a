from pathlib import Path

import pytest

from molinkd.coordinator.options import CoordinatorOptions, advertised_addresses, parse_options

#: A verify key, and a text of the same form that is not a verify key of any seed.
KEY = "-:@3456789012345678901234567890123400013"
NO_KEY = "-:@3456789012345678901234567890123456789"


def test_default_options(tmp_path: Path) -> None:
    options = parse_options(["--state", str(tmp_path), "--name", "home"])
    assert options == CoordinatorOptions(tmp_path, name="home")


def test_all_options(tmp_path: Path) -> None:
    arguments = [
        "--host",
        "1.2.3.4",
        "--port",
        "0",
        "--address",
        "a",
        "--address",
        "b:9",
        "--standalone",
        "--max-peers",
        "5",
        "--name",
        "x",
    ]
    arguments += [
        "--term",
        "7",
        "--leader",
        "p",
        "--lost-peer",
        "q",
        "--swarm",
        "s",
        "--pairing-port",
        "1",
    ]
    arguments += ["--state", str(tmp_path), "--replica", "copy"]
    options = parse_options([*arguments, "--member", f"{KEY}:a:b", f"--member={KEY}:c"])
    assert options == CoordinatorOptions(
        tmp_path,
        "1.2.3.4",
        0,
        "x",
        ("a", "b:9"),
        ((KEY, "a:b"), (KEY, "c")),
        standalone=True,
        max_peers=5,
        term=7,
        leader="p",
        replica=Path("copy"),
        lost_peer="q",
        swarm="s",
        pairing_port=1,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "--port 70000",
        "--max-peers 0",
        "--member short:name",
        f"--member {KEY}",
        f"--member {NO_KEY}:name",
    ],
)
def test_invalid_options_are_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--state", "x", *wrong.split()])
    assert "argument --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1:7"),
        ("pc.lan:99", "pc.lan:99"),
        ("fe80::1", "[fe80::1]:7"),
        ("[fe80::1]", "[fe80::1]:7"),
        ("[fe80::1]:99", "[fe80::1]:99"),
    ],
)
def test_advertised_addresses(host: str, address: str) -> None:
    assert advertised_addresses(CoordinatorOptions(Path(), addresses=(host,)), 7) == (address,)
    assert advertised_addresses(CoordinatorOptions(Path(), host=host.removesuffix(":99")), 7)[
        0
    ].endswith(":7")


def test_wildcard_host_advertises_reachable_interfaces() -> None:
    assert all(
        address.endswith(":7") for address in advertised_addresses(CoordinatorOptions(Path()), 7)
    )
