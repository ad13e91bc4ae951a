"""The swarm that this PC belongs to, as stored on disk."""

import time
from pathlib import Path

import msgspec

from molink.errors import UsageError
from molink.facts.model import AdapterFolders
from molink.swarm.membership.join_token import JoinToken
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.home import Home


class MembershipRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm of this PC, with its coordinator's ``addresses`` (``host:port``)."""

    swarm: str
    coordinator_key: str
    addresses: tuple[str, ...]
    #: Whether ``molink up`` founded the swarm on this PC.
    is_founder: bool = False
    #: Last known leader and its term (see :mod:`molink.swarm.election.leader_election`).
    leader: str = ""
    term: int = 0
    #: Model that ``molink up`` served last.
    model: str | None = None
    #: Whether this PC was removed from the swarm.
    is_banned: bool = False
    #: Further models of ``molink apply`` on this PC, which other PCs fetch from here.
    extra_models: tuple[str, ...] = ()
    #: Adapters of models of ``molink apply``.
    adapters: dict[str, AdapterFolders] = {}
    #: The rendezvous of the last run, and the leader when this PC joined, to call there until a
    #: heartbeat names one.
    rendezvous: str = ""
    first_leader: str = ""

    def save(self, path: Path) -> None:
        """Write the record to ``path``."""
        write_secret(path, msgspec.json.encode(self).decode("utf-8"))

    @property
    def leader_to_call(self) -> str:
        """The peer to call at the rendezvous."""
        return self.leader or self.first_leader

    @property
    def endpoints(self) -> tuple[str, ...]:
        """ZeroMQ endpoints of the coordinator."""
        return tuple(f"tcp://{address}" for address in self.addresses)


def read_membership(path: Path) -> MembershipRecord | None:
    """The stored record; ``None`` without one.

    Raises:
        UsageError: The file can't be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=MembershipRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} can't be read: {error}. Delete it and join the swarm again."
        ) from None


def parse_token(text: str) -> JoinToken:
    """A valid join token.

    Raises:
        TokenError: It is malformed or expired.
    """
    return JoinToken.parse(text, time.time())


def choose_membership(
    home: Home, record: MembershipRecord | None, text: str | None
) -> MembershipRecord | JoinToken:
    """The stored membership, or the token in ``text`` to join with.

    A token of the same swarm takes precedence, since the coordinator may have lost this PC or
    moved.

    Raises:
        TokenError: The token is malformed or expired.
        UsageError: There is neither, or this PC belongs to another swarm.
    """
    token = None if text is None else parse_token(text)
    if record is None and token is None:
        raise UsageError(
            "this PC is in no swarm: paste a token of `molink invite`, as in "
            f"{home.format_command('join molink-…')}, or run {home.format_command('join')} in a "
            "terminal, which asks "
            "for it"
        )
    is_elsewhere = record is not None and token is not None and record.swarm != token.swarm
    if record is not None and (record.is_founder or is_elsewhere):
        raise UsageError(explain_membership(home, record))
    chosen = token or record
    assert chosen is not None
    return chosen


def explain_membership(home: Home, record: MembershipRecord) -> str:
    """Say which swarm this PC belongs to, how to start it, and how to join another one."""
    own = record.is_founder
    what = "has its own swarm" if own else f"is a member of swarm {record.swarm}"
    return (
        f"this PC {what}: {home.format_command('up' if own else 'join')} starts it. To join "
        f"another swarm, run {home.format_command('leave')} first, or use another state folder "
        "with --home"
    )
