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

from molink.checkpoint.manifest import Manifest, Shard
from molink.errors import FilesMissing, ModelError, Unavailable
from molink.swarm.artifacts.supply import HUB, Supply
from molinkd.peer.artifacts.pieces import IN_FLIGHT, Turn, fetch_pieces
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.shard_draft import ShardDraft
from molinkd.peer.artifacts.suppliers import Reputation, Suppliers

log = logging.getLogger(__name__)

#: Where nobody sends one more byte, all are asked again after pauses of so many seconds: together
#: less than what a coordinator grants a transfer that stands still.
PAUSES_S = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class ShardFetch:
    """One transfer of shards of ``model``, from those of ``supply``.

    ``connect`` makes a context of the sources that it is given. ``count`` is told of bytes that
    came. Nobody waits for a ``copy``.
    """

    model: str
    manifest: Manifest
    supply: Supply
    connect: Callable[[Supply], Suppliers]
    reputation: Reputation
    progress: Progress
    count: Callable[[int], None]
    turn: Turn
    copy: bool = False

    async def have(self, path: Path, shard: Shard) -> None:
        """Have a shard at ``path``, whole and right; what has come is kept if that fails.

        Raises:
            FilesMissing: nobody has it.
            MolinkError: nobody gives it as it should be, or the disk is full; says why.
        """
        try:
            draft = await asyncio.to_thread(partial(ShardDraft, path, shard, copy=self.copy))
            try:
                await self._recall(draft)
                await self._fetch(draft, shard, self.supply, () if self.copy else PAUSES_S)
                if not draft.right:
                    await self._mend(draft, shard)
                await asyncio.to_thread(draft.finish)
            finally:
                await asyncio.to_thread(draft.close)
        except OSError as error:
            raise ModelError(f"can't write {path}: {error}") from error

    async def _recall(self, draft: ShardDraft) -> None:
        """What came at an earlier time counts, as it is hashed."""
        kept = 0
        while nbytes := await asyncio.to_thread(draft.hash_next):
            self.progress.keep(nbytes)
            kept += nbytes
        self.progress.keep(draft.nbytes - kept)

    async def _fetch(
        self, draft: ShardDraft, shard: Shard, supply: Supply, pauses: Sequence[float]
    ) -> None:
        """Have all pieces; again and again while that brings any."""
        fruitless, at_once = 0, 1 if self.copy else IN_FLIGHT
        while missing := draft.missing():
            before = draft.nbytes
            async with self.connect(supply) as suppliers:
                suppliers.knows(self.manifest)
                try:
                    await fetch_pieces(
                        suppliers,
                        missing,
                        draft.write,
                        self.count,
                        at_once,
                        self.turn,
                        to_the_end=True,
                    )
                    break
                except Unavailable as error:
                    if suppliers.lacks([shard.name]):
                        raise FilesMissing(self._nobody_has(shard)) from error
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

    async def _mend(self, draft: ShardDraft, shard: Shard) -> None:
        """Have it from one source alone, and find out who sent other bytes."""
        what = f"{shard.name} of {self.model}"
        log.warning("%s is not what the hub says it is (SHA-256): it is fetched again", what)
        sent = await asyncio.to_thread(draft.sent)
        senders = {who for who, _ in sent.values()}
        if len(senders) == 1 and len(sent) == draft.pieces:
            self.reputation.lied(senders.pop(), _altered(shard))
        reasons = []
        for who, alone in self._one_by_one():
            await asyncio.to_thread(draft.discard)
            try:
                self.progress.total += shard.nbytes
                await self._fetch(draft, shard, alone, ())
            except Unavailable as error:
                reasons.append(str(error))
                continue
            if draft.right:
                for liar in await asyncio.to_thread(draft.differs, sent):
                    self.reputation.lied(liar, _altered(shard))
                return
            self.reputation.lied(who, _altered(shard))
            reasons.append(_altered(shard))
        if draft.whole:  # what came from the last one alone may be right so far
            await asyncio.to_thread(draft.discard)
        raise Unavailable(f"nobody gives {what} as the hub says it is: {'; '.join(reasons)}")

    def _nobody_has(self, shard: Shard) -> str:
        return (
            f"no PC that is here has {shard.name} of {self.model}, and this PC doesn't ask the hub "
            "for it (setting hub_files). Start a PC that has it, or have one bring all of the "
            f"model (`molink pull {self.manifest.hub.partition('@')[0]}`, then `molink run`)"
        )

    def _one_by_one(self) -> Iterator[tuple[str, Supply]]:
        if self.supply.hub:
            yield HUB, Supply(hub=self.supply.hub)
        for peer in self.supply.whole:
            yield peer, Supply((peer,))
        for peer in self.supply.some:
            yield peer, Supply((), (peer,))


def _altered(shard: Shard) -> str:
    return f"its bytes of {shard.name} are not what the hub says (SHA-256)"
