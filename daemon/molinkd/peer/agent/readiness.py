"""Whether models can be used here, and why not: told to people, logged, and timed."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from molink.errors import MolinkError
from molink.wire.messages.instructions import Route
from molink.wire.messages.requests import StatusRequest
from molinkd.peer.agent.assignments import Assignments
from molinkd.peer.frontend.streams import Requests
from molinkd.peer.launch import Announce, ModelReady, NotServed
from molinkd.peer.membership.session import CoordinatorSession

log = logging.getLogger(__name__)

#: From a pipeline that isn't ready to asking why, in seconds.
WHY_S = 2.0


class Readiness:
    """What has been told of each model and each pipeline; tells what is news."""

    def __init__(
        self,
        announce: Announce,
        session: CoordinatorSession,
        assignments: Assignments,
        requests: Requests,
    ) -> None:
        self._announce, self._session = announce, session
        self._assignments, self._requests = assignments, requests
        self._ready: dict[str, bool] = {}
        #: Per pipeline, why it isn't ready, as announced last.
        self._reasons: dict[str, str] = {}
        #: Of which model each pipeline is.
        self._models: dict[str, str] = {}
        #: Pipelines that were ready when the coordinator last spoke of them.
        self._were_ready: set[str] = set()
        self._asking: asyncio.Task[None] | None = None

    def model_changed(self, model: str) -> None:
        """A model may have become ready, or not be ready any more."""
        ready = self._requests.ready(model)
        if ready != self._ready.get(model, False):
            self._ready[model] = ready
            self._announce(ModelReady(model=model, ready=ready))

    def take(self, route: Route) -> None:
        """The coordinator has spoken of a pipeline."""
        self._tell_reason(route)
        if self._concerns(route):
            self._time_recovery(route)
        if not (route.ready or route.forming) and self._asking is None:
            loop = asyncio.get_running_loop()
            self._asking = loop.create_task(self._log_why(route.model))

    def forget(self, pipelines: Sequence[str]) -> None:
        """They are no more."""
        for pipeline in pipelines:
            self._reasons.pop(pipeline, None)
            self._models.pop(pipeline, None)
            self._were_ready.discard(pipeline)

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _tell_reason(self, route: Route) -> None:
        if route.ready:
            self._reasons.pop(route.pipeline, None)
        elif route.reason and route.reason != self._reasons.get(route.pipeline):
            self._reasons[route.pipeline] = route.reason
            self._announce(NotServed(model=route.model, reason=route.reason))

    def _concerns(self, route: Route) -> bool:
        """Whether it is of the model that this PC has a stage of, if it has one."""
        self._models[route.pipeline] = route.model
        held = [self._models.get(state.pipeline) for state in self._assignments.states()]
        return not any(held) or route.model in held

    def _time_recovery(self, route: Route) -> None:
        now, recovery = asyncio.get_running_loop().time(), self._assignments.recovery
        if route.ready:
            # A PC without a stage is told of nothing in between.
            recovery.ended("formed" if self._assignments.states() else "others", now)
            self._requests.until_replayed(route.model, self._replayed)
        elif route.pipeline in self._were_ready:
            recovery.noticed(now, time.time())
        if route.ready:
            self._were_ready.add(route.pipeline)
        else:
            self._were_ready.discard(route.pipeline)

    def _replayed(self) -> None:
        text = self._assignments.recovery.over(asyncio.get_running_loop().time())
        if text is not None:
            log.info("%s", text)

    async def _log_why(self, model: str) -> None:
        """Ask the coordinator why a pipeline isn't ready, once it has decided what to do."""
        try:
            await asyncio.sleep(WHY_S)
            _, text = await self._session.request_payload(StatusRequest(ref=0), timeout=3.0)
            reason = _why(json.loads(text), model)
            if reason:
                log.info("%s is not ready: %s", model, reason)
        except MolinkError as error:
            log.info("%s is not ready, and why is not known: %s", model, error)
        finally:
            self._asking = None


def _why(status: dict[str, Any], model: str) -> str:
    """Why a model isn't ready, as the coordinator has it."""
    mine = [one for one in status.get("pipelines", ()) if one.get("model", model) == model]
    reasons = [one["reason"] for one in mine if one.get("reason")]
    return reasons[0] if reasons else str(status["trouble"])
