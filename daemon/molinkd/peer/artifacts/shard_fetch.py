"""Fetches shards from several sources, although only a whole shard can be verified.

A shard with a wrong hash is discarded and fetched from a single source, the hub before any peer.
The valid copy then identifies the senders of altered runs.
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
from molinkd.peer.artifacts.partial_shard import PartialShard
from molinkd.peer.artifacts.sources import (
    MAX_IN_FLIGHT,
    Reputation,
    SourcePool,
    Throttle,
    fetch_runs,
)
from molinkd.peer.artifacts.transfers import Progress

log = logging.getLogger(__name__)

#: Retry pauses in seconds without any progress; their sum is below the coordinator's limit for a
#: stalled transfer.
RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class ShardFetch:
    """One transfer of shards of ``model`` from the sources in ``supply``.

    ``connect`` opens a pool of given sources. ``on_bytes`` counts received bytes. ``is_replica``
    marks background replication.
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

    async def fetch_shard(self, folder: Path, shard: ShardEntry) -> None:
        """Fetch and verify a shard into ``folder``; received runs are kept on failure.

        Raises:
            FilesMissing: No source has the shard.
            MolinkError: No source sent it correctly, or the disk is full.
        """
        try:
            partial_shard = await asyncio.to_thread(
                partial(PartialShard, folder, shard, copy=self.is_replica)
            )
            try:
                await self._count_existing(partial_shard)
                await self._fetch_runs(
                    partial_shard, shard, self.supply, () if self.is_replica else RETRY_PAUSES_S
                )
                if not partial_shard.is_valid:
                    await self._refetch_alone(partial_shard, shard)
                await asyncio.to_thread(partial_shard.commit_shard)
            finally:
                await asyncio.to_thread(partial_shard.close)
        except OSError as error:
            raise ModelError(f"can't write {folder / shard.name}: {error}") from error

    async def _count_existing(self, partial_shard: PartialShard) -> None:
        """Count the runs of an earlier transfer while hashing them."""
        kept = 0
        while nbytes := await asyncio.to_thread(partial_shard.hash_next):
            self.progress.add_existing(nbytes)
            kept += nbytes
        self.progress.add_existing(partial_shard.nbytes - kept)

    async def _fetch_runs(
        self,
        partial_shard: PartialShard,
        shard: ShardEntry,
        supply: ModelSources,
        pauses: Sequence[float],
    ) -> None:
        """Fetch all missing runs; retries as long as there is progress."""
        fruitless, at_once = 0, 1 if self.is_replica else MAX_IN_FLIGHT
        while missing := partial_shard.missing_runs():
            before = partial_shard.nbytes
            async with self.connect(supply) as pool:
                pool.set_manifest(self.manifest)
                try:
                    await fetch_runs(
                        pool,
                        missing,
                        partial_shard.write_run,
                        self.on_bytes,
                        at_once,
                        self.throttle,
                        to_the_end=True,
                    )
                    break
                except Unavailable as error:
                    if pool.are_unavailable([shard.name]):
                        raise FilesMissing(self._missing_text(shard)) from error
                    fruitless = 0 if partial_shard.nbytes > before else fruitless + 1
                    if fruitless > len(pauses):
                        raise
                    log.warning(
                        "%s of %s: fetched %d of %d MB, retrying the rest: %s",
                        shard.name,
                        self.model,
                        partial_shard.nbytes / 1e6,
                        shard.nbytes / 1e6,
                        error,
                    )
            await asyncio.sleep(pauses[fruitless - 1] if fruitless else 0)
        while await asyncio.to_thread(partial_shard.hash_next):
            pass

    async def _refetch_alone(self, partial_shard: PartialShard, shard: ShardEntry) -> None:
        """Fetch the shard from one source at a time, and find the senders of altered runs."""
        what = f"{shard.name} of {self.model}"
        log.warning("%s has a wrong SHA-256: fetching it again", what)
        sent = await asyncio.to_thread(partial_shard.sender_digests)
        senders = {who for who, _ in sent.values()}
        if len(senders) == 1 and len(sent) == partial_shard.num_runs:
            self.reputation.record_misbehaviour(senders.pop(), _altered_text(shard))
        reasons = []
        for who, alone in self._single_sources():
            await asyncio.to_thread(partial_shard.discard_runs)
            try:
                self.progress.total += shard.nbytes
                await self._fetch_runs(partial_shard, shard, alone, ())
            except Unavailable as error:
                reasons.append(str(error))
                continue
            if partial_shard.is_valid:
                for sender in await asyncio.to_thread(partial_shard.find_altered, sent):
                    self.reputation.record_misbehaviour(sender, _altered_text(shard))
                return
            self.reputation.record_misbehaviour(who, _altered_text(shard))
            reasons.append(_altered_text(shard))
        if (
            partial_shard.is_complete
        ):  # an incomplete shard of the last source alone may still be valid
            await asyncio.to_thread(partial_shard.discard_runs)
        raise Unavailable(f"no source has a valid {what}: {'; '.join(reasons)}")

    def _missing_text(self, shard: ShardEntry) -> str:
        return (
            f"no connected PC has {shard.name} of {self.model}, and this PC does not ask the hub "
            "for it (setting hub_files). Start a PC that has it, or have one provide the whole "
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
    return f"{shard.name} has a wrong SHA-256"
