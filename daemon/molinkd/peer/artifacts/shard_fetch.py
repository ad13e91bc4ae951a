"""Gets shards from many at once, though only of a whole one is known what it has to be.

What came of one that is not what the hub says is thrown away; then it comes from one source alone,
the hub before any peer. Once it is right here, it shows who sent which piece otherwise.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from molink.checkpoint.manifest import Manifest, ShardEntry
from molink.errors import FilesMissing, ModelError, Unavailable
from molink.swarm.artifacts.sources import HUB, ModelSources
from molinkd.peer.artifacts.chunk_runs import MAX_IN_FLIGHT, Throttle, fetch_runs
from molinkd.peer.artifacts.partial_shard import PartialShard
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.sources import Reputation, SourcePool

log = logging.getLogger(__name__)

#: Where nobody sends one more byte, all are asked again after pauses of so many seconds: together
#: less than what a coordinator grants a transfer that stands still.
RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class ShardFetch:
    """One transfer of shards of ``model``, from those of ``supply``.

    ``connect`` makes a context of the sources that it is given. ``on_bytes`` is told of bytes that
    came. Nobody waits for a ``is_replica``.
    """

    model: str
    manifest: Manifest
    supply: ModelSources
    connect: Callable[[ModelSources], SourcePool]
    reputation: Reputation
    progress: Progress
    on_bytes: Callable[[int], None]
    throttle: Throttle
    is_replica: bool = False

    async def fetch_shard(self, path: Path, shard: ShardEntry) -> None:
        """Have a shard at ``path``, whole and right; what has come is kept if that fails.

        Raises:
            FilesMissing: nobody has it.
            MolinkError: nobody gives it as it should be, or the disk is full; says why.
        """
        try:
            draft = await asyncio.to_thread(
                partial(PartialShard, path, shard, copy=self.is_replica)
            )
            try:
                await self._count_existing(draft)
                await self._fetch_runs(
                    draft, shard, self.supply, () if self.is_replica else RETRY_PAUSES_S
                )
                if not draft.is_valid:
                    await self._refetch_alone(draft, shard)
                await asyncio.to_thread(draft.commit_shard)
            finally:
                await asyncio.to_thread(draft.close)
        except OSError as error:
            raise ModelError(f"can't write {path}: {error}") from error

    async def _count_existing(self, draft: PartialShard) -> None:
        """What came at an earlier time counts, as it is hashed."""
        kept = 0
        while nbytes := await asyncio.to_thread(draft.hash_next):
            self.progress.add_existing(nbytes)
            kept += nbytes
        self.progress.add_existing(draft.nbytes - kept)

    async def _fetch_runs(
        self, draft: PartialShard, shard: ShardEntry, supply: ModelSources, pauses: Sequence[float]
    ) -> None:
        """Have all pieces; again and again while that brings any."""
        fruitless, at_once = 0, 1 if self.is_replica else MAX_IN_FLIGHT
        while missing := draft.missing_runs():
            before = draft.nbytes
            async with self.connect(supply) as pool:
                pool.set_manifest(self.manifest)
                try:
                    await fetch_runs(
                        pool,
                        missing,
                        draft.write_run,
                        self.on_bytes,
                        at_once,
                        self.throttle,
                        to_the_end=True,
                    )
                    break
                except Unavailable as error:
                    if pool.are_unavailable([shard.name]):
                        raise FilesMissing(self._missing_text(shard)) from error
                    fruitless = 0 if draft.nbytes > before else fruitless + 1
                    if fruitless > len(pauses):
                        raise
                    log.warning(
                        "%s of %s: %d of %d MB are here, the rest is asked for again: %s",
                        shard.name,
                        self.model,
                        draft.nbytes / 1e6,
                        shard.nbytes / 1e6,
                        error,
                    )
            await asyncio.sleep(pauses[fruitless - 1] if fruitless else 0)
        while await asyncio.to_thread(draft.hash_next):
            pass

    async def _refetch_alone(self, draft: PartialShard, shard: ShardEntry) -> None:
        """Have it from one source alone, and find out who sent other bytes."""
        what = f"{shard.name} of {self.model}"
        log.warning("%s is not what the hub says it is (SHA-256): it is fetched again", what)
        sent = await asyncio.to_thread(draft.sender_digests)
        senders = {who for who, _ in sent.values()}
        if len(senders) == 1 and len(sent) == draft.num_runs:
            self.reputation.record_misbehaviour(senders.pop(), _altered_text(shard))
        reasons = []
        for who, alone in self._single_sources():
            await asyncio.to_thread(draft.discard_runs)
            try:
                self.progress.total += shard.nbytes
                await self._fetch_runs(draft, shard, alone, ())
            except Unavailable as error:
                reasons.append(str(error))
                continue
            if draft.is_valid:
                for liar in await asyncio.to_thread(draft.find_altered, sent):
                    self.reputation.record_misbehaviour(liar, _altered_text(shard))
                return
            self.reputation.record_misbehaviour(who, _altered_text(shard))
            reasons.append(_altered_text(shard))
        if draft.is_complete:  # what came from the last one alone may be right so far
            await asyncio.to_thread(draft.discard_runs)
        raise Unavailable(f"nobody gives {what} as the hub says it is: {'; '.join(reasons)}")

    def _missing_text(self, shard: ShardEntry) -> str:
        return (
            f"no PC that is here has {shard.name} of {self.model}, and this PC doesn't ask the hub "
            "for it (setting hub_files). Start a PC that has it, or have one bring all of the "
            f"model (`molink pull {self.manifest.hub.partition('@')[0]}`, then `molink run`)"
        )

    def _single_sources(self) -> Iterator[tuple[str, ModelSources]]:
        if self.supply.hub:
            yield HUB, ModelSources(hub=self.supply.hub)
        for peer in self.supply.full_peers:
            yield peer, ModelSources((peer,))
        for peer in self.supply.partial_peers:
            yield peer, ModelSources((), (peer,))


def _altered_text(shard: ShardEntry) -> str:
    return f"its bytes of {shard.name} are not what the hub says (SHA-256)"
