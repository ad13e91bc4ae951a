"""Peers that a model's parts are read from, one after the other: who fails or lies is left.

Nothing that they send is believed. The root says which manifest is right, and the manifest which
chunks are; so a part may come from several peers, and one that sends anything else is known to lie.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol, Self, TypeVar

from molink.checkpoint.manifest import CHUNK_BYTES, Manifest, manifest_bytes
from molink.errors import AlteredModel, MolinkError, Unavailable, WireError
from molink.swarm.fetch_plan import Piece
from molink.swarm.transfer import MIN_RATE
from molinkd.peer.gate import Gate, together
from molinkd.peer.progress import Progress

log = logging.getLogger(__name__)

#: A source that brings fewer bytes per second is left, while another one is to be had.
SLOW_RATE = 2 * MIN_RATE
#: A source is judged by at least so many seconds.
TRIAL_S = 10.0
#: Text of a source that an error message may quote, in characters.
_MAX_QUOTE = 400

T = TypeVar("T")


class Source(Protocol):
    """A peer that says it holds a model."""

    async def manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        """The size of a model's manifest, and bytes of it from ``offset`` on."""
        ...

    async def read(self, root: str, part: str, index: int) -> bytes:
        """A chunk of one of its parts."""
        ...

    async def read_slice(self, root: str, part: str, index: int, begin: int, length: int) -> bytes:
        """``length`` bytes of a chunk from ``begin`` on."""
        ...


#: Opens a connection to the peer of that id.
Connect = Callable[[str], AbstractAsyncContextManager[Source]]
#: Is told which peer lied, and with what.
OnLiar = Callable[[str, str], None]


class Reputation:
    """What is remembered of sources from one transfer to the next."""

    def __init__(self, on_liar: OnLiar) -> None:
        self._on_liar = on_liar
        self._lies: dict[str, str] = {}
        self._failed: dict[str, float] = {}

    def lied(self, peer: str, reason: str) -> None:
        """It sent what no honest peer sends."""
        if peer not in self._lies:
            log.warning("peer %s is no source of models any more: %s", peer, reason)
            self._on_liar(peer, reason)
        self._lies[peer] = reason

    def failed(self, peer: str) -> None:
        """It did not send what was asked for."""
        self._failed[peer] = time.monotonic()

    def lie(self, peer: str) -> str:
        """With what it lied; empty if it never did."""
        return self._lies.get(peer, "")

    def in_order(self, peers: Sequence[str]) -> list[str]:
        """Whom to ask first: who never failed, then those whose failure is long ago."""
        return sorted(peers, key=lambda peer: self._failed.get(peer, 0.0))

    def forget(self, peer: str) -> None:
        """It is no member any more."""
        self._lies.pop(peer, None)
        self._failed.pop(peer, None)


class Suppliers:
    """The sources of one transfer of the model ``root``; a context, which ends all connections."""

    def __init__(
        self,
        connect: Connect,
        reputation: Reputation,
        root: str,
        peers: Sequence[str],
        on_source: Callable[[str], None] = lambda _: None,
        *,
        patient: bool = False,
        paced: bool = False,
        floor: float = 0.0,
    ) -> None:
        """``on_source`` is told of each that is asked.

        ``patient``: nobody waits for it, so no source is too slow, nor a failure a warning.
        ``paced``: a pipeline serves, and the transfer gives way to it, but for ``floor`` bytes per
        second.
        """
        self._paced, self._floor = paced, floor
        self._gate = Gate(floor)
        self._on_source = on_source
        self._patient = patient
        self._connect = connect
        self._reputation = reputation
        self._root = root
        self._left = reputation.in_order(peers)
        self._reasons: list[str] = []
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._source: Source | None = None
        #: All that were asked; the last one is that of ``_source`` if there is one.
        self._asked: list[str] = []
        self._since = 0.0
        self._bytes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def manifest(self, progress: Progress) -> Manifest:
        """The manifest.

        Raises:
            Unavailable: nobody has it; says what each answered.
        """

        begun = progress.done
        progress.total += manifest_bytes(self._root)

        async def ask(source: Source) -> Manifest:
            progress.done = begun
            raw = await self._raw_manifest(source, progress)
            return await asyncio.to_thread(Manifest.open, raw, self._root)

        return await self._ask(ask)

    async def read(self, piece: Piece, keep: Callable[[bytes], None]) -> None:
        """Have ``keep`` called in a thread with a chunk that is as it should be.

        Raises:
            Unavailable: nobody has it; says what each answered.
        """

        def take(data: bytes) -> None:
            piece.part.check(piece.index, data)
            keep(data)

        async def ask(source: Source) -> None:
            if self._paced:
                data = await self._slices(source, piece)
            else:
                data = await source.read(self._root, piece.part.name, piece.index)
            await asyncio.to_thread(take, data)
            self._bytes += len(data)

        await self._ask(ask)

    async def _slices(self, source: Source, piece: Piece) -> bytes:
        """A chunk, slice by slice, each when it is its turn."""
        gate, data = self._gate, bytearray(piece.length)

        async def get(begin: int, length: int) -> None:
            async with gate.slice(length):
                part = await source.read_slice(
                    self._root, piece.part.name, piece.index, begin, length
                )
            if len(part) != length:
                raise WireError(f"it sent {len(part)} of {length} bytes of a chunk")
            data[begin : begin + length] = part

        size = gate.size
        await together(
            get(begin, min(size, piece.length - begin)) for begin in range(0, piece.length, size)
        )
        return bytes(data)

    async def _raw_manifest(self, source: Source, progress: Progress) -> bytes:
        raw = bytearray()
        due = manifest_bytes(self._root)
        while len(raw) < due:
            size, data = await source.manifest(self._root, len(raw))
            if size != due or len(data) != min(CHUNK_BYTES, due - len(raw)):
                raise AlteredModel(
                    f"of the model's list of hashes, {due} bytes, it sent {len(data)} of {size} "
                    f"at {len(raw)}"
                )
            raw += data
            progress.add(len(data))
        self._bytes += len(raw)
        return bytes(raw)

    async def _ask(self, ask: Callable[[Source], Awaitable[T]]) -> T:
        while True:
            number, source = await self._current()
            try:
                answer = await ask(source)
            except MolinkError as error:
                self._leave(number, error)
                continue
            self._judge(number)
            return answer

    async def _current(self) -> tuple[int, Source]:
        """The source in use, and which of those asked it is; the next one if there is none."""
        async with self._opening:
            while self._source is None:
                if not self._left:
                    raise Unavailable("; ".join(self._reasons) or "no peer that is here holds them")
                peer = self._left.pop(0)
                lie = self._reputation.lie(peer)
                if lie:
                    self._reasons.append(f"{peer}: not asked again, since {lie}")
                    continue
                self._asked.append(peer)
                try:
                    source = await self._stack.enter_async_context(self._connect(peer))
                except MolinkError as error:
                    self._note(peer, error)
                    continue
                self._source, self._since, self._bytes = source, time.monotonic(), 0
                self._gate = Gate(self._floor)
                self._on_source(peer)
            return len(self._asked), self._source

    def _leave(self, number: int, error: MolinkError) -> None:
        """Ask the next one from now on."""
        peer = self._asked[number - 1]
        if number == len(self._asked) and self._source is not None:
            self._source = None
            self._note(peer, error)
        if isinstance(error, AlteredModel):
            self._reputation.lied(peer, str(error)[:_MAX_QUOTE])

    def _judge(self, number: int) -> None:
        seconds = time.monotonic() - self._since
        others = any(not self._reputation.lie(peer) for peer in self._left)
        if (
            others
            and not (self._patient or self._paced)
            and seconds >= TRIAL_S
            and self._bytes < SLOW_RATE * seconds
        ):
            self._leave(number, Unavailable(f"{self._bytes} bytes in {seconds:.0f} s are too few"))

    def _note(self, peer: str, error: MolinkError) -> None:
        reason = str(error)[:_MAX_QUOTE]
        level = logging.DEBUG if self._patient else logging.WARNING
        log.log(level, "files from peer %s: %s", peer, reason)
        self._reasons.append(f"{peer}: {reason}")
        self._reputation.failed(peer)
