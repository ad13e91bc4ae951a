"""Carries out the owner's requests to the endpoint."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from molink.checkpoint.model_names import DEMO_MODEL_NAME
from molink.checkpoint.model_source import (
    check_model_name,
    expand_short_name,
    find_catalog_entry,
    find_local_model,
    find_served_name,
)
from molink.errors import Overloaded, RequestError
from molink.facts.model import Quantize
from molink.sim.swarm_capacity import explain_misfit, read_capacity
from molink.swarm.controller.status_schema import SwarmStatus, decode_status
from molink.wire.messages.admin import PairingDecisionReply, PairingDecisionRequest, SwitchModel
from molink.wire.messages.control_plane import ControlMessage
from molinkd.api.administration import LocalModel, ModelProgress, PcSetting
from molinkd.peer.artifacts.hashing import run_in_thread
from molinkd.peer.artifacts.installed_models import list_installed_models
from molinkd.peer.artifacts.pulling import fetch_whole_model
from molinkd.peer.artifacts.transfers import POLL_INTERVAL_S, Progress
from molinkd.peer.control_service import UserCommands
from molinkd.peer.frontend.loop_calls import call_on_loop
from molinkd.peer.frontend.safe_settings import change_safe_setting, list_safe_settings
from molinkd.peer.home import Home
from molinkd.tasks import cancel_tasks

#: Maximum number of downloads at once.
MAX_PULLS = 4


#: Longest wait for the daemon's answer, in seconds; it may have to ask the coordinator.
_CALL_S = 15.0
T = TypeVar("T")


@dataclass(slots=True)
class _Pull:
    task: asyncio.Task[object]
    progress: Progress
    num_watchers: int = 0


class LocalAdministration:
    """Implements :class:`molinkd.api.administration.Administration`."""

    def __init__(
        self,
        home: Home,
        peer_id: str,
        quantize: Quantize,
        commands: UserCommands,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``commands`` belong to ``loop``, all methods to the API's."""
        self._home, self._commands = home, commands
        self.peer_id, self.quantize = peer_id, quantize
        self._loop = loop
        self._pulls: dict[str, _Pull] = {}
        #: Held while the file of options is read, changed and written.
        self._options_lock = asyncio.Lock()

    async def pull_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        """Fetch a model's files to this PC; clients that name the same model share the download.

        Raises:
            ModelError: no such model, or it is not accessible.
            Overloaded: :data:`MAX_PULLS` downloads are in progress.
        """
        pull = self._pulls.get(model) or self._start_pull(model)
        pull.num_watchers += 1
        try:
            while not pull.task.done():
                yield ModelProgress("fetching", *pull.progress.totals)
                await asyncio.wait([pull.task], timeout=POLL_INTERVAL_S)
            pull.task.result()
        finally:
            pull.num_watchers -= 1
            if not pull.num_watchers:
                del self._pulls[model]
                await cancel_tasks(pull.task)

    async def serve_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        """Have the swarm serve a model in place of those it serves.

        Raises:
            ModelError: no such model, or it is not accessible.
            RequestError: it does not fit the swarm.
        """
        name, source = await asyncio.to_thread(_resolve_model, model)
        status = decode_status(await self._call(lambda: self._commands.query_status(False)))
        known = {one.name: one for one in status.models}
        if name in known:
            if known[name].stopped:
                await self._forward(SwitchModel(ref=0, model=name, served=True))
            yield ModelProgress("asked", name=name)
            return
        await asyncio.to_thread(self._check_fit, model, status)
        while True:
            reply = await self._call(lambda: self._commands.load_model(source))
            yield ModelProgress(reply.state, reply.done, reply.total, reply.name)
            if reply.state == "asked":
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    async def stop_model(self, name: str) -> None:
        """Unload a served model on all PCs."""
        await self._forward(SwitchModel(ref=0, model=name))

    async def decide_pairing(self, code: str, *, refuse: bool) -> str:
        """Approve or refuse the PC that shows ``code``; returns its name."""
        reply = await self._forward(PairingDecisionRequest(ref=0, code=code, refuse=refuse))
        assert isinstance(reply, PairingDecisionReply)
        return reply.name

    async def set_drained(self, drained: bool) -> None:
        """Move this PC's layers away, or take some again."""

        async def drain() -> None:
            self._commands.set_drained(drained, "")

        await self._call(drain)

    async def list_settings(self) -> list[PcSetting]:
        """The settings of this PC that may be changed here."""
        return await asyncio.to_thread(list_safe_settings, self._home)

    async def change_setting(self, name: str, value: str) -> None:
        """Change a setting from the next start on; an empty value forgets the change."""
        async with self._options_lock:
            await asyncio.to_thread(change_safe_setting, self._home, name, value)

    async def list_local_models(self) -> list[LocalModel]:
        """The models on this PC's disk, each once."""
        found: dict[str, LocalModel] = {}
        for one in await asyncio.to_thread(list_installed_models, self._home):
            source = ""
            if one.is_complete and one.location in ("cache", "bundled"):
                source = one.name
            elif one.is_complete and one.location in ("folder", "download"):
                source = str(one.path)
            if one.name not in found or source:
                found[one.name] = LocalModel(one.name, one.size, not one.is_complete, source)
        return [*found.values()]

    async def _call(self, make: Callable[[], Awaitable[T]]) -> T:
        return await call_on_loop(self._loop, make, _CALL_S, "the daemon did not answer in time")

    async def _forward(self, message: ControlMessage) -> ControlMessage:
        reply, _ = await self._call(lambda: self._commands.forward_request(message))
        return reply

    def _check_fit(self, model: str, status: SwarmStatus) -> None:
        entry = find_catalog_entry(model)
        capacity = read_capacity(status, self.quantize)
        why = "" if entry is None else explain_misfit(entry, capacity)
        if why:
            raise RequestError(f"{why}. Nothing was downloaded", "model")

    def _start_pull(self, model: str) -> _Pull:
        if len(self._pulls) >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} models are being fetched; wait for one", 60.0)
        progress = Progress(source="hub")

        async def fetch() -> object:
            await asyncio.to_thread(check_model_name, model)
            return await run_in_thread(
                lambda stop: fetch_whole_model(model, self._home, progress, stop)
            )

        pull = self._pulls[model] = _Pull(asyncio.create_task(fetch()), progress)
        return pull


def _resolve_model(model: str) -> tuple[str, str]:
    """The name under which the swarm would serve ``model``, and what the daemon loads."""
    check_model_name(model)
    local = None if model == DEMO_MODEL_NAME else find_local_model(model)
    return find_served_name(model), expand_short_name(model) if local is None else str(local)
