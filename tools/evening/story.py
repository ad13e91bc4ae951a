"""What happens on a changing evening: an hour, for four PCs of one home swarm.

Everybody's links fall from 100 to 20 Mbps while the street watches films, and recover. Meanwhile a
laptop becomes hot: its steps take four times as long. Later another PC leaves, and returns.

    for event in story(scale=0.1): ...

PCs are numbered from 0; PC 0 joined first and stays as it is, so the swarm can be led from there,
and requests be sent there. A link is the way out of a PC: all that it sends shares it. Whatever is
not said here (devices, model, requests) is up to who plays it.
"""

from dataclasses import dataclass

#: Seconds, and how often the figures are looked at.
DURATION = 3600.0
MINUTE = 60.0
PEERS = 4
#: Of every link before anything happens.
MBPS = 100.0
#: One way, always.
DELAY_MS = 15.0

#: PCs that something happens to.
HOT, AWAY = 1, 2


@dataclass(frozen=True, slots=True)
class LinkChange:
    """From ``at`` seconds on, all that ``peer`` sends has ``mbps``."""

    at: float
    peer: int
    mbps: float


@dataclass(frozen=True, slots=True)
class PaceChange:
    """From ``at`` on, a step of ``peer`` takes ``factor`` times as long as when it is cool."""

    at: float
    peer: int
    factor: float


@dataclass(frozen=True, slots=True)
class Leave:
    """At ``at``, ``peer`` is gone without a word: its power is cut."""

    at: float
    peer: int


@dataclass(frozen=True, slots=True)
class Return:
    """At ``at``, ``peer`` is switched on again."""

    at: float
    peer: int


Event = LinkChange | PaceChange | Leave | Return

#: Minute, and what every link has from then on.
_LINKS = ((10, 60.0), (12, 35.0), (14, 20.0), (26, 35.0), (28, 60.0), (30, 100.0))
#: Minute, and how many times as long a step of the hot PC takes.
_PACES = ((20, 2.0), (21, 4.0), (38, 1.0))
#: Minutes at which a PC leaves, and returns.
_LEAVES, _RETURNS = 44, 50


def story(scale: float = 1.0) -> tuple[Event, ...]:
    """The evening in order, with all times multiplied by ``scale``; it takes ``DURATION * scale``.

    What deciders wait for is not scaled: at 0.1 a minute that a pace has to stay is ten of these.
    """
    minute = MINUTE * scale
    events: list[Event] = [
        LinkChange(at * minute, peer, mbps) for at, mbps in _LINKS for peer in range(PEERS)
    ]
    events += [PaceChange(at * minute, HOT, factor) for at, factor in _PACES]
    events += [Leave(_LEAVES * minute, AWAY), Return(_RETURNS * minute, AWAY)]
    return tuple(sorted(events, key=lambda event: event.at))
