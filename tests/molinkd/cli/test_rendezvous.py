"""``molink rendezvous``: its secret, and what it prints."""

from pathlib import Path

import pytest

from molink.errors import UsageError
from molink.wire.messages.rendezvous import RendezvousAddress
from molinkd.cli import rendezvous as module
from molinkd.cli.rendezvous import load_secret


def test_the_secret_stays(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.key"
    secret = load_secret(path)
    assert load_secret(path) == secret
    path.unlink()
    assert load_secret(path) != secret
    path.write_text("no secret", encoding="utf-8")
    with pytest.raises(UsageError, match=r"rendezvous\.key"):
        load_secret(path)


def test_the_command_for_the_first_pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, RendezvousAddress]] = []

    async def serve(host: str, address: RendezvousAddress) -> None:
        served.append((host, address))

    monkeypatch.setattr(module, "_serve", serve)
    module.rendezvous(None, 99, "meet.example", tmp_path)
    ((host, address),) = served
    assert (host, address.place) == ("", "meet.example:99")
    (line,) = [one for one in module._describe(address).splitlines() if "molink up" in one]
    assert RendezvousAddress.parse(line.split()[-1]) == address
    with pytest.raises(UsageError, match="--advertise"):
        module.rendezvous(None, 99, "meet.example:5464", tmp_path)
