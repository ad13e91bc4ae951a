"""Has the swarm serve the models of a file: all are found here first, then asked for at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from molink.checkpoint.source import is_here, is_hub_file, is_repository
from molink.errors import MolinkError, UsageError, WorkerError
from molink.wire.messages.base import Payload
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.requests import (
    Applied,
    ApplyFile,
    ApplyModels,
    Bringing,
    ModelEntry,
    ModelWish,
    Wishes,
)
from molinkd.peer.artifacts.founder import Founder


class Applier:
    """The newest file; an earlier one ends with it."""

    def __init__(
        self,
        begin: Callable[[ModelEntry], Founder],
        ask: Callable[[ControlMessage, bytes], Awaitable[tuple[ControlMessage, bytes]]],
        applied: Callable[[Sequence[str]], None],
        kept: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``begin`` makes what finds a model; ``ask`` asks the coordinator for all of them.

        ``applied`` is told of each file that was carried out: the models as it names them.
        ``kept(model)``: what is needed of it to bring it is in the store.
        """
        self._begin, self._ask, self._applied, self._kept = begin, ask, applied, kept
        self._order: ApplyFile | None = None
        self._founder: Founder | None = None
        self._task: asyncio.Task[bytes] | None = None

    async def apply(self, order: ApplyFile) -> tuple[Bringing | Applied, bytes]:
        """How far it is with ``order``, or what the coordinator says, with the payload.

        Begins it if that is another one, or the last has ended.

        Raises:
            MolinkError: a model can't be found or read, or something in it can't be; says why.
        """
        order = msgspec.structs.replace(order, ref=0)
        if self._task is None or self._order != order:
            await self.close()
            self._order, self._founder = order, None
            self._task = asyncio.get_running_loop().create_task(self._carry_out(order))
        task, founder = self._task, self._founder
        if not task.done():
            if founder is None:
                return Bringing(ref=0, state="looking"), b""
            done, total = founder.progress.shown
            far = Bringing(ref=0, state=founder.state, name=founder.name, done=done, total=total)
            return far, b""
        self._task = None
        try:
            text = await task
        except MolinkError:
            raise
        except Exception as error:
            raise WorkerError(f"the file can't be applied: internal error: {error!r}") from error
        return Applied(ref=0, payload=Payload("u8", (len(text),))), text

    async def close(self) -> None:
        """End what is under way; what was fetched is kept."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _carry_out(self, order: ApplyFile) -> bytes:
        # Whether this PC may, and all have the version: before anything is fetched.
        await self._have_served((), order, dry=True)
        wishes = [await self._wish(entry, dry=order.dry) for entry in order.models]
        text = await self._have_served(tuple(wishes), order, dry=order.dry)
        if not order.dry:
            self._applied([entry.source for entry in order.models])
        return text

    async def _have_served(
        self, wishes: tuple[ModelWish, ...], order: ApplyFile, *, dry: bool
    ) -> bytes:
        data = msgspec.msgpack.encode(Wishes(models=wishes, molink=order.molink))
        message = ApplyModels(ref=0, payload=Payload("u8", (len(data),)), dry=dry)
        return (await self._ask(message, data))[1]

    def _is_here(self, name: str) -> bool:
        return is_here(name) or self._kept(name)

    async def _wish(self, entry: ModelEntry, *, dry: bool) -> ModelWish:
        name = entry.source
        fetched = is_repository(name) or is_hub_file(name)
        if dry and fetched and not await asyncio.to_thread(self._is_here, name):
            raise UsageError(
                f"{name} is not on this PC, and a dry run fetches nothing: `molink pull {name}` "
                "first"
            )
        founder = self._founder = self._begin(entry)
        await founder.find_model()
        await founder.hash_model()
        assert founder.facts is not None
        return ModelWish(
            model=founder.facts,
            replicas=entry.replicas,
            min_stages=entry.min_stages,
            objective=entry.objective,
            dtype=entry.dtype,
            quantize=entry.quantize,
            micro_batches=entry.micro_batches,
            pins=entry.pins,
        )
