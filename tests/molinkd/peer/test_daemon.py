"""A daemon's handling of tokens and output errors."""

import time
from pathlib import Path
from typing import Any

import pytest

from molink.errors import MolinkError, PeerBanned, TokenError, Unavailable
from molink.swarm.membership.join_token import JoinToken
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer import daemon as module
from molinkd.peer.daemon import Daemon
from molinkd.peer.launch import AnyDaemonEvent, Launch, ProblemReportedEvent
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.settings import Settings

KEYS = KeyPair.generate()
KNOWN = MembershipRecord(swarm="s", coordinator_key=KEYS.public, addresses=("10.0.0.1:5466",))
TOKEN = JoinToken("s", ("10.0.0.9:5466",), KEYS.public, KEYS.secret, int(time.time()) + 60)


def failing(
    monkeypatch: pytest.MonkeyPatch, folder: Path, error: MolinkError
) -> tuple[Daemon, list[AnyDaemonEvent]]:
    async def join(*_: Any) -> MembershipRecord:
        raise error

    monkeypatch.setattr(module, "join_swarm", join)
    events: list[AnyDaemonEvent] = []
    launch = Launch(home=str(folder), settings=Settings(name="pc"), role="join")
    return Daemon(launch, events.append), events


@pytest.mark.parametrize("error", [TokenError("used up"), Unavailable("nobody there")])
async def test_a_member_continues_with_an_invalid_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: MolinkError
) -> None:
    daemon, events = failing(monkeypatch, tmp_path, error)
    context: Any = None
    membership = await daemon._join_swarm(context, KEYS, TOKEN, KNOWN)
    assert (membership.swarm, membership.addresses) == ("s", TOKEN.addresses)
    (reported,) = events
    assert isinstance(reported, ProblemReportedEvent)
    assert str(error) in reported.text
    with pytest.raises(type(error)):
        await daemon._join_swarm(context, KEYS, TOKEN, None)


async def test_a_banned_member_does_not_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    daemon, events = failing(monkeypatch, tmp_path, PeerBanned("revoked"))
    context: Any = None
    with pytest.raises(PeerBanned):
        await daemon._join_swarm(context, KEYS, TOKEN, KNOWN)
    assert events == []


def test_an_output_error_is_ignored(tmp_path: Path) -> None:
    """A full disk under a redirected terminal must not keep a leader from resigning."""

    tried: list[AnyDaemonEvent] = []

    def full(event: AnyDaemonEvent) -> None:
        tried.append(event)
        raise OSError(28, "No space left on device")

    launch = Launch(home=str(tmp_path), settings=Settings(name="pc"), role="join")
    daemon = Daemon(launch, full)
    events = [ProblemReportedEvent(text=text) for text in ("the coordinator has ended", "again")]
    for event in events:
        daemon._announce(event)
    assert tried == events
