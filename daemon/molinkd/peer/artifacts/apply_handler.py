"""Has the swarm serve the models of a file: all are found here first, then asked for at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from molink.checkpoint.model_source import is_hub_file, is_local, is_repository
from molink.errors import MolinkError, UsageError, WorkerError
from molink.wire.messages.admin import (
    ApplyFile,
    ApplyModels,
    ApplyReply,
    DesiredModels,
    LoadModelReply,
    ModelEntry,
    ModelSpec,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.control_plane import ControlMessage
from molinkd.peer.artifacts.bootstrap import Bootstrap


class ApplyHandler:
    """The newest file; an earlier one ends with it."""

    def __init__(
        self,
        make_bootstrap: Callable[[ModelEntry], Bootstrap],
        ask: Callable[[ControlMessage, bytes], Awaitable[tuple[ControlMessage, bytes]]],
        on_applied: Callable[[Sequence[str]], None],
        is_stored: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``make_bootstrap`` makes what finds a model; ``ask`` asks the coordinator for all of
        them.

        ``on_applied`` is told of each file that was carried out: the models as it names them.
        ``kept(model)``: what is needed of it to bring it is in the store.
        """
        self._make_bootstrap, self._ask, self._on_applied, self._is_stored = (
            make_bootstrap,
            ask,
            on_applied,
            is_stored,
        )
        self._order: ApplyFile | None = None
        self._bootstrap: Bootstrap | None = None
        self._task: asyncio.Task[bytes] | None = None

    async def apply_file(self, order: ApplyFile) -> tuple[LoadModelReply | ApplyReply, bytes]:
        """How far it is with ``order``, or what the coordinator says, with the payload.

        Begins it if that is another one, or the last has ended.

        Raises:
            MolinkError: a model can't be found or read, or something in it can't be; says why.
        """
        order = msgspec.structs.replace(order, ref=0)
        if self._task is None or self._order != order:
            await self.close()
            self._order, self._bootstrap = order, None
            self._task = asyncio.get_running_loop().create_task(self._carry_out(order))
        task, bootstrap = self._task, self._bootstrap
        if not task.done():
            if bootstrap is None:
                return LoadModelReply(ref=0, state="looking"), b""
            done, total = bootstrap.progress.totals
            far = LoadModelReply(
                ref=0, state=bootstrap.state, name=bootstrap.name, done=done, total=total
            )
            return far, b""
        self._task = None
        try:
            text = await task
        except MolinkError:
            raise
        except Exception as error:
            raise WorkerError(f"the file can't be applied: internal error: {error!r}") from error
        return ApplyReply(ref=0, payload=Payload("u8", (len(text),))), text

    async def close(self) -> None:
        """End what is under way; what was fetched is kept."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _carry_out(self, order: ApplyFile) -> bytes:
        # Whether this PC may, and all have the version: before anything is fetched.
        await self._request_models((), order, dry=True)
        specs = [await self._model_spec(entry, dry=order.dry_run) for entry in order.models]
        text = await self._request_models(tuple(specs), order, dry=order.dry_run)
        if not order.dry_run:
            self._on_applied([entry.source for entry in order.models])
        return text

    async def _request_models(
        self, specs: tuple[ModelSpec, ...], order: ApplyFile, *, dry: bool
    ) -> bytes:
        data = msgspec.msgpack.encode(DesiredModels(models=specs, molink=order.molink))
        message = ApplyModels(ref=0, payload=Payload("u8", (len(data),)), dry_run=dry)
        return (await self._ask(message, data))[1]

    def _is_local(self, name: str) -> bool:
        return is_local(name) or self._is_stored(name)

    async def _model_spec(self, entry: ModelEntry, *, dry: bool) -> ModelSpec:
        name = entry.source
        fetched = is_repository(name) or is_hub_file(name)
        if dry and fetched and not await asyncio.to_thread(self._is_local, name):
            raise UsageError(
                f"{name} is not on this PC, and a dry run fetches nothing: `molink pull {name}` "
                "first"
            )
        bootstrap = self._bootstrap = self._make_bootstrap(entry)
        await bootstrap.find_model()
        await bootstrap.hash_model()
        assert bootstrap.facts is not None
        return ModelSpec(
            model=bootstrap.facts,
            replicas=entry.replicas,
            min_stages=entry.min_stages,
            objective=entry.objective,
            dtype=entry.dtype,
            quantize=entry.quantize,
            micro_batches=entry.micro_batches,
            pins=entry.pins,
        )
