"""Carries out ``molink apply``: finds all models of a file, then requests them together."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

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
from molinkd.tasks import cancel_tasks


class ApplyHandler:
    """Handles the newest file; a newer file cancels an older one."""

    def __init__(
        self,
        make_bootstrap: Callable[[ModelEntry], Bootstrap],
        ask: Callable[[ControlMessage, bytes], Awaitable[tuple[ControlMessage, bytes]]],
        on_applied: Callable[[Sequence[ModelEntry]], None],
        is_stored: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``make_bootstrap`` creates the loader of one model, ``ask`` calls the coordinator.

        ``on_applied`` gets the models of each applied file. ``is_stored(model)`` says whether the
        store holds enough of a model to request it.
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
        """The progress of ``order``, or the coordinator's reply with its payload.

        Starts the order if it differs from the running one, or if none is running.

        Raises:
            MolinkError: A model can't be found, read or served.
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
            raise WorkerError(f"can't apply the file: internal error: {error!r}") from error
        return ApplyReply(ref=0, payload=Payload("u8", (len(text),))), text

    async def close(self) -> None:
        """Cancel the running order; fetched files stay."""
        task, self._task = self._task, None
        await cancel_tasks(task)

    async def _carry_out(self, order: ApplyFile) -> bytes:
        # Check permission and versions before fetching anything.
        await self._request_models((), order, dry=True)
        specs = [await self._model_spec(entry, dry=order.dry_run) for entry in order.models]
        text = await self._request_models(tuple(specs), order, dry=order.dry_run)
        if not order.dry_run:
            self._on_applied(order.models)
        return text

    async def _request_models(
        self, specs: tuple[ModelSpec, ...], order: ApplyFile, *, dry: bool
    ) -> bytes:
        data = msgspec.msgpack.encode(DesiredModels(models=specs, molink=order.molink))
        message = ApplyModels(ref=0, payload=Payload("u8", (len(data),)), dry_run=dry)
        return (await self._ask(message, data))[1]

    def _is_local(self, name: str) -> bool:
        from molink.checkpoint.model_source import is_local

        return is_local(name) or self._is_stored(name)

    async def _model_spec(self, entry: ModelEntry, *, dry: bool) -> ModelSpec:
        from molink.checkpoint.model_source import is_hub_file, is_repository

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
            kv_cache_dtype=entry.kv_cache_dtype,
            micro_batches=entry.micro_batches,
            pins=entry.pins,
        )
