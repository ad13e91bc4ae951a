"""Peers that a model's parts are read from, several at once: who fails or lies is left.

Nothing that they send is believed. The root says which manifest is right, and the manifest which
chunks are; so a part may come from several peers, and one that sends anything else is known to lie.
Of a shard only the whole is known: who sent which piece is told, and judged once that is there.
Who has only some of the parts says which, and is asked for these; where that is not so, the next
one is asked.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from molink.checkpoint.folder import METADATA_FILES
from molink.checkpoint.manifest import CHUNK_BYTES, Manifest, manifest_bytes
from molink.errors import AlteredModel, MolinkError, Unavailable, WireError
from molink.swarm.artifacts.fetch_plan import Piece
from molink.swarm.artifacts.supply import HUB, Supply
from molink.swarm.artifacts.transfer import MIN_RATE
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.gate import Gate, together

log = logging.getLogger(__name__)

#: A source that brings fewer bytes per second is left, while another one is to be had.
SLOW_RATE = 2 * MIN_RATE
#: A source is judged by at least so many seconds.
TRIAL_S = 10.0
#: Sources that are read from at once. What is paced comes from one at a time: the paces of several
#: know nothing of each other.
AT_ONCE = 3
#: Text of a source that an error message may quote, in characters.
_MAX_QUOTE = 400

T = TypeVar("T")


class Source(Protocol):
    """A peer that says it holds a model, or some parts of it."""

    async def manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        """The size of a model's manifest, and bytes of it from ``offset`` on."""
        ...

    async def parts(self, root: str) -> bytes:
        """Which parts it has (:meth:`Manifest.marks`); asked only of who has not all of them."""
        ...

    async def read(self, root: str, part: str, index: int) -> bytes:
        """A chunk of one of its parts."""
        ...

    async def read_slice(self, root: str, part: str, index: int, begin: int, length: int) -> bytes:
        """``length`` bytes of a chunk from ``begin`` on."""
        ...


#: Opens a connection to the peer of that id, or to the hub for ``OWNER/NAME@COMMIT``.
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


@dataclass(slots=True, eq=False)
class _Open:
    """A source that is connected."""

    peer: str
    source: Source
    gate: Gate
    since: float
    #: Nobody is asked while one of a lower rank has it.
    rank: int
    #: The parts that it has; ``None``: all.
    has: Collection[str] | None = None
    #: Whether it still has to say that.
    to_ask: bool = False
    under_way: int = 0
    nbytes: int = 0

    def able(self, part: str | None) -> bool:
        """Whether it is worth asking for a part; ``None``: for the manifest."""
        if self.peer == HUB:
            return part is not None and part not in METADATA_FILES
        return part is None or (not self.to_ask and (self.has is None or part in self.has))


class Suppliers:
    """The sources of one transfer of the model ``root``; a context, which ends all connections."""

    def __init__(
        self,
        connect: Connect,
        reputation: Reputation,
        root: str,
        supply: Supply,
        on_source: Callable[[str], None] = lambda _: None,
        *,
        near: Callable[[str], bool] = lambda _: True,
        patient: bool = False,
        paced: bool = False,
        floor: float = 0.0,
    ) -> None:
        """``on_source`` is told of each that is asked; ``near`` says whether a peer is close by.

        ``patient``: nobody waits for it, so no source is too slow, nor a failure a warning.
        ``paced``: a pipeline serves, and the transfer gives way to it, but for ``floor`` bytes per
        second.
        """
        self._paced, self._floor = paced, floor
        self._on_source = on_source
        self._patient = patient
        self._connect = connect
        self._reputation = reputation
        self._root = root
        self._some, self._hub = frozenset(supply.some), supply.hub
        peers = reputation.in_order((*supply.whole, *supply.some))
        #: Who was not asked yet, with their ranks.
        self._left = supply.in_turn(peers, near)
        self._manifest: Manifest | None = None
        self._reasons: list[str] = []
        self._failed = False
        self._stack = AsyncExitStack()
        #: Connects to one source more, or asks one what it has.
        self._widening: asyncio.Task[None] | None = None
        #: In the order of their ranks, since they are connected to in that order.
        self._open: list[_Open] = []
        #: What those have that have said it; ``None``: somebody has all.
        self._seen: set[str] | None = None if supply.whole or supply.hub else set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._widening is not None:
            self._widening.cancel()
            await asyncio.gather(self._widening, return_exceptions=True)
        await self._stack.aclose()

    def knows(self, manifest: Manifest) -> None:
        """The manifest lies here already."""
        self._manifest = manifest

    def lacks(self, parts: Collection[str]) -> bool:
        """Whether all sources were asked and answered, and one of these parts nobody has."""
        if self._left or self._failed or self._seen is None:
            return False
        return not self._seen.issuperset(parts)

    async def manifest(self, progress: Progress) -> Manifest:
        """The manifest.

        Raises:
            Unavailable: nobody has it; says what each answered.
        """

        begun = progress.done
        progress.total += manifest_bytes(self._root)

        async def ask(one: _Open) -> Manifest:
            progress.done = begun
            raw = await self._raw_manifest(one, progress)
            return await asyncio.to_thread(Manifest.open, raw, self._root)

        self._manifest = await self._ask(ask, None)
        return self._manifest

    async def read(self, piece: Piece, keep: Callable[[bytes, str], None]) -> None:
        """Have ``keep`` called in a thread with a piece that is as it should be, and who sent it.

        Of a shard that means its length alone.

        Raises:
            Unavailable: nobody has it; says what each answered.
        """

        def take(data: bytes, peer: str) -> None:
            piece.check(data)
            keep(data, peer)

        async def ask(one: _Open) -> None:
            data = await self._bytes(one, piece)
            await asyncio.to_thread(take, data, one.peer)
            one.nbytes += len(data)

        await self._ask(ask, piece.part.name)

    async def _bytes(self, one: _Open, piece: Piece) -> bytes:
        name = piece.part.name
        if self._paced:
            return b"".join([await self._slices(one, chunk) for chunk in piece.chunks()])
        if one.peer == HUB:
            return await one.source.read_slice(self._root, name, piece.index, 0, piece.length)
        return b"".join(
            [await one.source.read(self._root, name, chunk.index) for chunk in piece.chunks()]
        )

    async def _slices(self, one: _Open, piece: Piece) -> bytes:
        """A chunk, slice by slice, each when it is its turn."""
        gate, data = one.gate, bytearray(piece.length)

        async def get(begin: int, length: int) -> None:
            async with gate.slice(length):
                part = await one.source.read_slice(
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

    async def _raw_manifest(self, one: _Open, progress: Progress) -> bytes:
        raw = bytearray()
        due = manifest_bytes(self._root)
        while len(raw) < due:
            size, data = await one.source.manifest(self._root, len(raw))
            if size != due or len(data) != min(CHUNK_BYTES, due - len(raw)):
                raise AlteredModel(
                    f"of the model's list of hashes, {due} bytes, it sent {len(data)} of {size} "
                    f"at {len(raw)}"
                )
            raw += data
            progress.add(len(data))
        one.nbytes += len(raw)
        return bytes(raw)

    # --- whom to ask -------------------------------------------------------------------------

    async def _ask(self, ask: Callable[[_Open], Awaitable[T]], part: str | None) -> T:
        while True:
            one = await self._choose(part)
            one.under_way += 1
            try:
                answer = await ask(one)
            except MolinkError as error:
                self._leave(one, error)
                continue
            finally:
                one.under_way -= 1
            self._judge(one)
            return answer

    async def _choose(self, part: str | None) -> _Open:
        """Of the sources that have a part the one with the least to do."""
        while True:
            able = [one for one in self._open if one.able(part)]
            if not able or (part is not None and self._wants_more(able[0].rank)):
                self._widen()
            if able:
                same = [one for one in able if one.rank == able[0].rank]
                return same[0] if self._paced else min(same, key=lambda one: one.under_way)
            widening = self._widening
            if widening is None:
                raise Unavailable("; ".join(self._reasons) or "no peer that is here holds them")
            await asyncio.wait([widening])
            widening.result()

    def _wants_more(self, rank: int) -> bool:
        """Whether there should be others beside those of ``rank``, or be asked what they have."""
        few = len(self._open) < AT_ONCE and bool(self._left) and self._left[0][0] <= rank
        return not self._paced and (few or any(one.to_ask for one in self._open))

    def _widen(self) -> None:
        """Have one source more that can be asked, soon; unless that is under way already."""
        if self._widening is not None and not self._widening.done():
            return
        unasked = [one for one in self._open if one.to_ask and self._manifest is not None]
        if unasked or self._left:
            self._widening = asyncio.create_task(self._ask_or_connect(unasked))
        else:
            self._widening = None

    async def _ask_or_connect(self, unasked: Sequence[_Open]) -> None:
        if not unasked:
            await self._connect_to(*self._left.pop(0))
            return
        one, manifest = unasked[0], self._manifest
        assert manifest is not None
        try:
            one.has = manifest.marked(await one.source.parts(self._root))
        except MolinkError as error:
            self._leave(one, error)
        else:
            one.to_ask = False
            if self._seen is not None:
                self._seen |= one.has

    async def _connect_to(self, rank: int, peer: str) -> None:
        lie = self._reputation.lie(peer)
        if lie:
            self._reasons.append(f"{peer}: not asked again, since {lie}")
            return
        try:
            source = await self._stack.enter_async_context(
                self._connect(self._hub if peer == HUB else peer)
            )
        except MolinkError as error:
            self._note(peer, error)
            return
        gate, to_ask = Gate(self._floor), peer in self._some
        one = _Open(peer, source, gate, time.monotonic(), rank, to_ask=to_ask)
        self._open.append(one)
        self._on_source(peer)

    def _leave(self, one: _Open, error: MolinkError) -> None:
        """Ask others from now on."""
        if one in self._open:
            self._open.remove(one)
            self._note(one.peer, error)
        if isinstance(error, AlteredModel):
            self._reputation.lied(one.peer, str(error)[:_MAX_QUOTE])

    def _judge(self, one: _Open) -> None:
        """Leave a source that is too slow; several at once share the line."""
        seconds = time.monotonic() - one.since
        left = (peer for _, peer in self._left)
        others = len(self._open) > 1 or not all(map(self._reputation.lie, left))
        if (
            others
            and not (self._patient or self._paced)
            and seconds >= TRIAL_S
            and one.nbytes < SLOW_RATE * seconds / max(1, len(self._open))
        ):
            self._leave(one, Unavailable(f"{one.nbytes} bytes in {seconds:.0f} s are too few"))

    def _note(self, peer: str, error: MolinkError) -> None:
        reason = str(error)[:_MAX_QUOTE]
        level = logging.DEBUG if self._patient else logging.WARNING
        log.log(level, "files from peer %s: %s", peer, reason)
        self._reasons.append(f"{peer}: {reason}")
        self._failed = True
        self._reputation.failed(peer)
