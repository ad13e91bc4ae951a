"""What :mod:`molink.swarm.election.succession` is told, and what it decides."""

from dataclasses import dataclass

from molink.wire.messages.leading import LeaderView

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """The coordinator that this peer is connected to has spoken, in this term.

    ``leader`` is the peer on whose PC it runs; empty for one without a daemon.
    """

    term: int
    leader: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection to the coordinator is lost."""


@dataclass(frozen=True, slots=True)
class Known:
    """All members in the order of succession, and the replica (term, revision) that is held."""

    order: tuple[str, ...]
    replica: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Answered:
    """A peer has said whom it follows, as an answer or with a question of its own."""

    peer: str
    view: LeaderView


@dataclass(frozen=True, slots=True)
class Silent:
    """A peer that was asked can't be reached, or doesn't answer."""

    peer: str


@dataclass(frozen=True, slots=True)
class Led:
    """The coordinator of this PC runs, as :class:`Lead` asked for, in that term or a higher one."""

    term: int
    coordinator_key: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotLed:
    """The coordinator of this PC can't be started, or doesn't stay."""


@dataclass(frozen=True, slots=True)
class Resigned:
    """This daemon ends in good order."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed."""


Event = Heard | ConnectionLost | Known | Answered | Silent | Led | NotLed | Resigned | TimePassed


# --- decisions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a peer whom it follows; :class:`Answered` or :class:`Silent` has to come of it."""

    peer: str


@dataclass(frozen=True, slots=True)
class Follow:
    """Connect to the coordinator that runs at ``leader``."""

    leader: str
    term: int
    coordinator_key: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lead:
    """Run the coordinator here, in this term, or start it again if it runs already.

    ``lost`` is the peer that led until now and can't be reached; empty if there is none.
    """

    term: int
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Raise:
    """The coordinator here goes on in this term; none of its connections is lost."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """End the coordinator that runs here: another one leads."""


Decision = Ask | Follow | Lead | Raise | StepDown
