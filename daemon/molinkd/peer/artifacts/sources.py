"""Reads a model's parts from several sources at once, and drops those that fail or misbehave.

Sources are not trusted. The root identifies the manifest, and the manifest identifies the chunks,
so parts may come from several peers and altered bytes identify their sender. A shard can only be
verified as a whole, so senders are recorded per run and judged later. A source with only some of
the parts is asked for its list first.
"""

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import BinaryIO, Protocol, Self, TypeVar

from molink.checkpoint.manifest import CHUNK_BYTES, Manifest, manifest_size
from molink.checkpoint.model_folder import METADATA_FILES
from molink.errors import AlteredModel, MolinkError, Unavailable, WireError
from molink.swarm.artifacts.fetch_plan import ChunkRun
from molink.swarm.artifacts.rate_limit import TransferRateLimiter
from molink.swarm.artifacts.sources import HUB, ModelSources
from molink.swarm.artifacts.transfer import MIN_RATE
from molinkd.peer.artifacts.transfers import Progress
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)


#: A slower source is dropped while another one is available, in bytes/s.
MIN_SOURCE_RATE = 2 * MIN_RATE
#: Minimum time before a source is judged as slow, in seconds.
TRIAL_S = 10.0
#: Sources read concurrently. A limited transfer uses one: separate rate limiters do not coordinate.
MAX_CONNECTED = 3
#: Maximum characters of a source's error text that are quoted.
_MAX_QUOTE = 400

T = TypeVar("T")


class SliceLimiter:
    """Rate limiter of one transfer from one source."""

    def __init__(self, floor: float) -> None:
        """``floor`` is the minimum request rate in bytes/s."""
        self._pacer = TransferRateLimiter(floor)
        self._lock = asyncio.Lock()
        self._received = asyncio.Event()

    @property
    def slice_bytes(self) -> int:
        """Bytes per slice."""
        return self._pacer.slice_bytes

    @asynccontextmanager
    async def limit_slice(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until a slice may be requested, and time it until it has arrived."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            while (wait := self._pacer.wait_time(clock())) != 0:
                self._received.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._received.wait()
            started = clock()
            self._pacer.on_request(started)
        try:
            yield
        except BaseException:
            self._pacer.on_failure()
            self._received.set()
            raise
        now = clock()
        self._pacer.on_slice(nbytes, now - started, now)
        self._received.set()


async def run_together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines concurrently; the first error cancels the others and is raised unchanged."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_tasks(*tasks)


class Source(Protocol):
    """A source of a model's files."""

    async def read_manifest(self, root: str, offset: int) -> tuple[int, bytes]:
        """Size of a model's manifest, and bytes of it from ``offset`` on."""
        ...

    async def read_parts(self, root: str) -> bytes:
        """Bitfield of the available parts; only asked of sources that lack some."""
        ...

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        """A chunk of a part."""
        ...

    async def read_slice(self, root: str, part: str, index: int, offset: int, length: int) -> bytes:
        """``length`` bytes of a chunk from ``offset`` on."""
        ...


#: Connects to a peer id, or to the hub for ``OWNER/NAME@COMMIT``.
Connect = Callable[[str], AbstractAsyncContextManager[Source]]
#: Called with a misbehaving peer and the reason.
OnMisbehaviour = Callable[[str, str], None]


class Reputation:
    """Record of sources over all transfers."""

    def __init__(self, on_liar: OnMisbehaviour) -> None:
        self._on_misbehaviour = on_liar
        self._misbehaviour: dict[str, str] = {}
        self._failed_at: dict[str, float] = {}

    def record_misbehaviour(self, peer: str, reason: str) -> None:
        """Exclude a peer that sent altered data."""
        if peer not in self._misbehaviour:
            log.warning("peer %s is excluded as a source of models: %s", peer, reason)
            self._on_misbehaviour(peer, reason)
        self._misbehaviour[peer] = reason

    def record_failure(self, peer: str) -> None:
        """Record a failed request."""
        self._failed_at[peer] = time.monotonic()

    def find_misbehaviour(self, peer: str) -> str:
        """Why the peer is excluded; empty if it is not."""
        return self._misbehaviour.get(peer, "")

    def order_peers(self, peers: Sequence[str]) -> list[str]:
        """``peers`` by the time of their last failure, oldest first."""
        return sorted(peers, key=lambda peer: self._failed_at.get(peer, 0.0))

    def drop_peer(self, peer: str) -> None:
        """Drop the record of a removed peer."""
        self._misbehaviour.pop(peer, None)
        self._failed_at.pop(peer, None)


@dataclass(slots=True, eq=False)
class _ConnectedSource:
    peer: str
    source: Source
    rate_limit: SliceLimiter
    since: float
    #: Preference: sources of a lower rank are asked first.
    rank: int
    #: Available parts; ``None`` means all.
    parts: Collection[str] | None = None
    #: Whether ``parts`` still has to be queried.
    parts_unknown: bool = False
    in_flight: int = 0
    nbytes: int = 0

    def can_serve(self, part: str | None) -> bool:
        """Whether it may have ``part``; ``None`` stands for the manifest."""
        if self.peer == HUB:
            return part is not None and part not in METADATA_FILES
        return part is None or (
            not self.parts_unknown and (self.parts is None or part in self.parts)
        )


class SourcePool:
    """The sources of one transfer of the model ``root``, as an async context."""

    def __init__(
        self,
        connect: Connect,
        reputation: Reputation,
        root: str,
        supply: ModelSources,
        on_source: Callable[[str], None] = lambda _: None,
        *,
        is_nearby: Callable[[str], bool] = lambda _: True,
        patient: bool = False,
        rate_limited: bool = False,
        floor: float = 0.0,
    ) -> None:
        """``on_source`` gets each source that is connected.

        ``patient`` is for background transfers: slow sources are kept and failures not warned of.
        ``paced`` limits the rate in favour of a serving pipeline, down to ``floor`` bytes/s.
        """
        self._rate_limited, self._min_rate = rate_limited, floor
        self._on_source = on_source
        self._is_patient = patient
        self._connect = connect
        self._reputation = reputation
        self._root = root
        self._partial_peers, self._hub = frozenset(supply.partial_peers), supply.hub
        peers = reputation.order_peers((*supply.full_peers, *supply.partial_peers))
        #: Ranks and ids of sources that were not connected yet.
        self._remaining = supply.rank_sources(peers, is_nearby)
        self._manifest: Manifest | None = None
        self._reasons: list[str] = []
        self._has_failed = False
        self._stack = AsyncExitStack()
        #: Connects one more source, or queries the parts of one.
        self._adding: asyncio.Task[None] | None = None
        #: Connected sources in order of rank.
        self._connected: list[_ConnectedSource] = []
        #: Parts available from all queried sources; ``None`` if one has all parts.
        self._available_parts: set[str] | None = None if supply.full_peers or supply.hub else set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._adding)
        await self._stack.aclose()

    def set_manifest(self, manifest: Manifest) -> None:
        """Set a manifest that is stored already."""
        self._manifest = manifest

    def are_unavailable(self, parts: Collection[str]) -> bool:
        """Whether all sources have replied, and one of ``parts`` is available from none."""
        if self._remaining or self._has_failed or self._available_parts is None:
            return False
        return not self._available_parts.issuperset(parts)

    async def fetch_manifest(self, progress: Progress) -> Manifest:
        """Fetch the manifest.

        Raises:
            Unavailable: No source has it; the message quotes each.
        """

        started = progress.done
        progress.total += manifest_size(self._root)

        async def ask(one: _ConnectedSource) -> Manifest:
            progress.done = started
            raw = await self._read_raw_manifest(one, progress)
            return await asyncio.to_thread(Manifest.open, raw, self._root)

        self._manifest = await self._request(ask, None)
        return self._manifest

    async def read_run(self, run: ChunkRun, write: Callable[[bytes, str], None]) -> None:
        """Read a run; ``write`` is called in a thread with its bytes and the sender.

        The bytes are verified first; of a shard, only their length.

        Raises:
            Unavailable: No source has it; the message quotes each.
        """

        def take(data: bytes, peer: str) -> None:
            run.check_data(data)
            write(data, peer)

        async def ask(one: _ConnectedSource) -> None:
            data = await self._read_from(one, run)
            await asyncio.to_thread(take, data, one.peer)
            one.nbytes += len(data)

        await self._request(ask, run.part.name)

    async def _read_from(self, one: _ConnectedSource, run: ChunkRun) -> bytes:
        name = run.part.name
        if self._rate_limited:
            return b"".join([await self._read_slices(one, chunk) for chunk in run.split_chunks()])
        if one.peer == HUB:
            return await one.source.read_slice(self._root, name, run.index, 0, run.nbytes)
        return b"".join(
            [
                await one.source.read_chunk(self._root, name, chunk.index)
                for chunk in run.split_chunks()
            ]
        )

    async def _read_slices(self, one: _ConnectedSource, run: ChunkRun) -> bytes:
        """A chunk, read in rate-limited slices."""
        gate, data = one.rate_limit, bytearray(run.nbytes)

        async def get(offset: int, length: int) -> None:
            async with gate.limit_slice(length):
                part = await one.source.read_slice(
                    self._root, run.part.name, run.index, offset, length
                )
            if len(part) != length:
                raise WireError(f"it sent {len(part)} of {length} bytes of a chunk")
            data[offset : offset + length] = part

        size = gate.slice_bytes
        await run_together(
            get(offset, min(size, run.nbytes - offset)) for offset in range(0, run.nbytes, size)
        )
        return bytes(data)

    async def _read_raw_manifest(self, one: _ConnectedSource, progress: Progress) -> bytes:
        raw = bytearray()
        size_due = manifest_size(self._root)
        while len(raw) < size_due:
            size, data = await one.source.read_manifest(self._root, len(raw))
            if size != size_due or len(data) != min(CHUNK_BYTES, size_due - len(raw)):
                raise AlteredModel(
                    f"manifest of {size_due} bytes: it sent {len(data)} of {size} at {len(raw)}"
                )
            raw += data
            progress.add_bytes(len(data))
        one.nbytes += len(raw)
        return bytes(raw)

    # --- choosing sources ---

    async def _request(
        self, ask: Callable[[_ConnectedSource], Awaitable[T]], part: str | None
    ) -> T:
        while True:
            one = await self._choose_source(part)
            one.in_flight += 1
            try:
                answer = await ask(one)
            except MolinkError as error:
                self._drop_source(one, error)
                continue
            finally:
                one.in_flight -= 1
            self._drop_if_slow(one)
            return answer

    async def _choose_source(self, part: str | None) -> _ConnectedSource:
        """The least busy source of the lowest rank that has ``part``."""
        while True:
            able = [one for one in self._connected if one.can_serve(part)]
            if not able or (part is not None and self._needs_more(able[0].rank)):
                self._add_source()
            if able:
                same = [one for one in able if one.rank == able[0].rank]
                return same[0] if self._rate_limited else min(same, key=lambda one: one.in_flight)
            widening = self._adding
            if widening is None:
                raise Unavailable("; ".join(self._reasons) or "no connected peer has them")
            await asyncio.wait([widening])
            widening.result()

    def _needs_more(self, rank: int) -> bool:
        """Whether to connect another source of at most ``rank``, or to query one."""
        few = (
            len(self._connected) < MAX_CONNECTED
            and bool(self._remaining)
            and self._remaining[0][0] <= rank
        )
        return not self._rate_limited and (few or any(one.parts_unknown for one in self._connected))

    def _add_source(self) -> None:
        """Connect or query one more source in the background."""
        if self._adding is not None and not self._adding.done():
            return
        unasked = [
            one for one in self._connected if one.parts_unknown and self._manifest is not None
        ]
        if unasked or self._remaining:
            self._adding = asyncio.create_task(self._query_or_connect(unasked))
        else:
            self._adding = None

    async def _query_or_connect(self, unasked: Sequence[_ConnectedSource]) -> None:
        if not unasked:
            await self._connect_to(*self._remaining.pop(0))
            return
        one, manifest = unasked[0], self._manifest
        assert manifest is not None
        try:
            one.parts = manifest.decode_bitfield(await one.source.read_parts(self._root))
        except MolinkError as error:
            self._drop_source(one, error)
        else:
            one.parts_unknown = False
            if self._available_parts is not None:
                self._available_parts |= one.parts

    async def _connect_to(self, rank: int, peer: str) -> None:
        misbehaviour = self._reputation.find_misbehaviour(peer)
        if misbehaviour:
            self._reasons.append(f"{peer}: excluded: {misbehaviour}")
            return
        try:
            source = await self._stack.enter_async_context(
                self._connect(self._hub if peer == HUB else peer)
            )
        except MolinkError as error:
            self._record_failure(peer, error)
            return
        gate, to_ask = SliceLimiter(self._min_rate), peer in self._partial_peers
        one = _ConnectedSource(peer, source, gate, time.monotonic(), rank, parts_unknown=to_ask)
        self._connected.append(one)
        self._on_source(peer)

    def _drop_source(self, one: _ConnectedSource, error: MolinkError) -> None:
        """Stop using a source."""
        if one in self._connected:
            self._connected.remove(one)
            self._record_failure(one.peer, error)
        if isinstance(error, AlteredModel):
            self._reputation.record_misbehaviour(one.peer, str(error)[:_MAX_QUOTE])

    def _drop_if_slow(self, one: _ConnectedSource) -> None:
        """Drop a slow source; concurrent sources share the link."""
        seconds = time.monotonic() - one.since
        left = (peer for _, peer in self._remaining)
        others = len(self._connected) > 1 or not all(map(self._reputation.find_misbehaviour, left))
        if (
            others
            and not (self._is_patient or self._rate_limited)
            and seconds >= TRIAL_S
            and one.nbytes < MIN_SOURCE_RATE * seconds / max(1, len(self._connected))
        ):
            self._drop_source(one, Unavailable(f"too slow: {one.nbytes} bytes in {seconds:.0f} s"))

    def _record_failure(self, peer: str, error: MolinkError) -> None:
        reason = str(error)[:_MAX_QUOTE]
        level = logging.DEBUG if self._is_patient else logging.WARNING
        log.log(level, "files from peer %s: %s", peer, reason)
        self._reasons.append(f"{peer}: {reason}")
        self._has_failed = True
        self._reputation.record_failure(peer)


#: Concurrent requests of one transfer.
MAX_IN_FLIGHT = 8

#: Context around each chunk run of a transfer, which delays and times it.
Throttle = Callable[[], AbstractAsyncContextManager[None]]
#: Stores a chunk run, given its bytes and the sender. Called in a thread.
RunWriter = Callable[[ChunkRun, bytes, str], None]


async def fetch_runs(
    pool: SourcePool,
    runs: Iterable[ChunkRun],
    write: RunWriter,
    count: Callable[[int], None],
    at_once: int = MAX_IN_FLIGHT,
    throttle: Throttle = nullcontext,
    *,
    to_the_end: bool = False,
) -> None:
    """Fetch all runs, ``at_once`` concurrently; ``count`` gets the bytes of each.

    With ``to_the_end`` a failure does not cancel the other requests in flight.

    Raises as :meth:`SourcePool.read_run`.
    """
    waiting = iter(runs)
    failures: list[Unavailable] = []

    async def work() -> None:
        for run in waiting:
            if failures:
                return
            try:
                async with throttle():
                    await pool.read_run(run, partial(write, run))
            except Unavailable as error:
                if not to_the_end:
                    raise
                failures.append(error)
                return
            count(run.nbytes)

    await run_together(work() for _ in range(at_once))
    if failures:
        raise failures[0]


def write_into(file: BinaryIO) -> RunWriter:
    """A writer that puts runs at their offsets in ``file``."""
    lock = Lock()

    def write(run: ChunkRun, data: bytes, _sender: str) -> None:
        with lock:
            file.seek(run.offset)
            file.write(data)

    return write
