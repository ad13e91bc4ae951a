"""Announces and logs whether models are ready, and times recoveries."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from molink.errors import MolinkError
from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.instructions import Route
from molinkd.peer.agent.stage_manager import StageManager
from molinkd.peer.frontend.swarm_backend import SwarmBackend
from molinkd.peer.launch import Announce, ModelReadinessChangedEvent, ModelUnavailableEvent
from molinkd.peer.membership.session import CoordinatorSession
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Delay before asking why a pipeline is not ready, in seconds.
REASON_DELAY_S = 2.0


class ReadinessMonitor:
    """Readiness of each model and pipeline as last announced; announces changes."""

    def __init__(
        self,
        announce: Announce,
        session: CoordinatorSession,
        assignments: StageManager,
        requests: SwarmBackend,
    ) -> None:
        self._announce, self._session = announce, session
        self._stages, self._backend = assignments, requests
        self._ready_models: dict[str, bool] = {}
        #: Last announced reason why a pipeline is not ready, by pipeline.
        self._reasons: dict[str, str] = {}
        #: Model of each pipeline.
        self._models: dict[str, str] = {}
        #: Pipelines that were ready by the coordinator's last route.
        self._ready_pipelines: set[str] = set()
        self._query: asyncio.Task[None] | None = None

    def update_model(self, model: str) -> None:
        """Announce the readiness of ``model`` if it changed."""
        ready = self._backend.is_ready(model)
        if ready != self._ready_models.get(model, False):
            self._ready_models[model] = ready
            self._announce(ModelReadinessChangedEvent(model=model, ready=ready))

    def on_route(self, route: Route) -> None:
        """Handle a new route of a pipeline."""
        self._announce_reason(route)
        if self._is_relevant(route):
            self._time_recovery(route)
        if not (route.is_ready or route.forming_progress) and self._query is None:
            loop = asyncio.get_running_loop()
            self._query = loop.create_task(self._log_reason(route.model))

    def drop_pipelines(self, pipelines: Sequence[str]) -> None:
        """Drop removed pipelines."""
        for pipeline in pipelines:
            self._reasons.pop(pipeline, None)
            self._models.pop(pipeline, None)
            self._ready_pipelines.discard(pipeline)

    async def close(self) -> None:
        """Cancel a pending query."""
        await cancel_tasks(self._query)

    def _announce_reason(self, route: Route) -> None:
        if route.is_ready:
            self._reasons.pop(route.pipeline, None)
        elif route.reason and route.reason != self._reasons.get(route.pipeline):
            self._reasons[route.pipeline] = route.reason
            self._announce(ModelUnavailableEvent(model=route.model, reason=route.reason))

    def _is_relevant(self, route: Route) -> bool:
        """Whether the route's model is the one that this PC has a stage of, if it has one."""
        self._models[route.pipeline] = route.model
        held = [self._models.get(state.pipeline) for state in self._stages.stage_states()]
        return not any(held) or route.model in held

    def _time_recovery(self, route: Route) -> None:
        now, recovery = asyncio.get_running_loop().time(), self._stages.recovery
        if route.is_ready:
            # A PC without a stage sees none of the steps in between.
            recovery.end_phase("formed" if self._stages.stage_states() else "others", now)
            self._backend.call_when_replayed(route.model, self._on_replayed)
        elif route.pipeline in self._ready_pipelines:
            recovery.start_outage(now, time.time())
        if route.is_ready:
            self._ready_pipelines.add(route.pipeline)
        else:
            self._ready_pipelines.discard(route.pipeline)

    def _on_replayed(self) -> None:
        text = self._stages.recovery.finish_recovery(asyncio.get_running_loop().time())
        if text is not None:
            log.info("%s", text)

    async def _log_reason(self, model: str) -> None:
        """Ask the coordinator why a pipeline is not ready, after giving it time to decide."""
        try:
            await asyncio.sleep(REASON_DELAY_S)
            _, text = await self._session.request_payload(StatusRequest(ref=0), timeout=3.0)
            reason = _find_reason(json.loads(text), model)
            if reason:
                log.info("%s is not ready: %s", model, reason)
        except MolinkError as error:
            log.info("%s is not ready, reason unknown: %s", model, error)
        finally:
            self._query = None


def _find_reason(status: dict[str, Any], model: str) -> str:
    """Why a model is not ready, by the coordinator's status."""
    mine = [one for one in status.get("pipelines", ()) if one.get("model", model) == model]
    reasons = [one["reason"] for one in mine if one.get("reason")]
    return reasons[0] if reasons else str(status["trouble"])
