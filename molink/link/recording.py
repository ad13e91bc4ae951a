"""Records a link policy's events and decisions as JSON lines, and replays them.

The first line names the policy. Each other line is an event, ``{"at", "event", "of"}``, or a
decision, ``{"at", "ready", "send": [volume, rows]}`` or ``{"at", "ready", "wait": until}`` (no
``wait``: until the next event). Numbers survive a round trip exactly. Times are seconds of the
recorder's clock.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import msgspec

from molink.errors import UsageError
from molink.link.policies.base import (
    ChannelPolicy,
    LinkAction,
    LinkEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.create import create_policy
from molink.wire.messages.data_plane import Channel

VERSION = 1
#: Maximum bytes of a recording, which then stops; the recorded part can be replayed.
MAX_BYTES = 256 << 20
#: Maximum characters of a line; written lines have up to about 200.
MAX_LINE = 4096

_EVENTS: dict[str, type[LinkEvent]] = {kind.__name__: kind for kind in get_args(LinkEvent)}

_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _HeaderRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: Annotated[str, msgspec.Meta(max_length=64)]
    version: _Whole


class _EventRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at: float
    event: str
    of: dict[str, Any]


class _ActionRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    at: float
    ready: Annotated[tuple[Channel, ...], msgspec.Meta(max_length=8)]
    send: tuple[_Whole, _Whole] | None = None
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """A decision that differed when ``line`` was replayed."""

    line: int
    at: float
    recorded: LinkAction
    replayed: LinkAction


class RecordingPolicy:
    """Wraps a policy and records its events and decisions."""

    def __init__(
        self, policy: ChannelPolicy, write: Callable[[bytes], object], maximum: int = MAX_BYTES
    ) -> None:
        """``write`` gets whole lines, at most ``maximum`` bytes of them."""
        self._policy = policy
        self._write = write
        self._bytes_left = maximum
        self._encoder = msgspec.json.Encoder()
        self._write_line(_HeaderRecord(policy.name, VERSION))

    @property
    def name(self) -> str:
        """The name of the wrapped policy."""
        return self._policy.name

    @property
    def single_channel(self) -> bool:
        """As the wrapped policy."""
        return self._policy.single_channel

    @property
    def is_full(self) -> bool:
        """Whether the recording has reached its maximum."""
        return self._bytes_left <= 0

    def handle(self, event: LinkEvent, now: float) -> None:
        """Record the event and pass it on."""
        if not self.is_full:
            fields = msgspec.to_builtins(event)
            self._write_line(_EventRecord(now, type(event).__name__, fields))
        self._policy.handle(event, now)

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        """Ask the policy and record the decision."""
        channels = tuple(ready)
        decision = self._policy.choose_action(now, ready)
        if isinstance(decision, SendRowsAction):
            self._write_line(
                _ActionRecord(at=now, ready=channels, send=(decision.volume, decision.rows))
            )
        else:
            self._write_line(_ActionRecord(at=now, ready=channels, wait=decision.until))
        return decision

    def _write_line(self, record: _HeaderRecord | _EventRecord | _ActionRecord) -> None:
        if self.is_full:
            return
        line = self._encoder.encode(record) + b"\n"
        if len(line) > self._bytes_left:
            self._bytes_left = 0
            return
        self._bytes_left -= len(line)
        self._write(line)


def replay_recording(
    lines: Iterable[bytes | str], create: Callable[[str], ChannelPolicy] = create_policy
) -> list[ReplayDifference]:
    """Replay a recording with a new policy of the same name and compare its decisions.

    Raises:
        UsageError: a line is invalid; the message has its number.
    """
    differences: list[ReplayDifference] = []
    policy: ChannelPolicy | None = None
    number = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = _parse_line(line, first=policy is None)
            if isinstance(record, _HeaderRecord):
                policy = create(record.policy)
                continue
            assert policy is not None
            if isinstance(record, _EventRecord):
                policy.handle(_decode_event(record), record.at)
                continue
        except (msgspec.MsgspecError, UsageError, ValueError) as error:
            raise UsageError(f"line {number} of the recording: {error}") from None
        recorded = WaitAction(record.wait) if record.send is None else SendRowsAction(*record.send)
        replayed = policy.choose_action(record.at, list(record.ready))
        if replayed != recorded:
            differences.append(ReplayDifference(number, record.at, recorded, replayed))
    if policy is None:
        raise UsageError("the recording is empty")
    return differences


def _parse_line(line: bytes | str, first: bool) -> _HeaderRecord | _EventRecord | _ActionRecord:
    if len(line) > MAX_LINE:
        raise UsageError(f"{len(line)} characters exceed {MAX_LINE}")
    if first:
        opened = msgspec.json.decode(line, type=_HeaderRecord)
        if opened.version != VERSION:
            raise UsageError(f"version {opened.version}; this molink reads {VERSION}")
        return opened
    raw = msgspec.json.decode(line, type=dict[str, Any])
    if "event" in raw:
        return msgspec.convert(raw, _EventRecord)
    return msgspec.convert(raw, _ActionRecord)


def _decode_event(record: _EventRecord) -> LinkEvent:
    kind = _EVENTS.get(record.event)
    if kind is None:
        raise UsageError(f"unknown event {record.event!r}")
    event = msgspec.convert(record.of, kind)
    for name in ("rows", "row_bytes"):
        if getattr(event, name, 1) < 1:
            raise UsageError(f"{name} of {record.event} is {record.of[name]}")
    for name, value in record.of.items():
        if isinstance(value, int) and value < 0:
            raise UsageError(f"{name} of {record.event} is {value}")
    return event
