"""What a stage does with controls that it has completed, before they go on to the next stage."""

from collections.abc import Callable, Sequence

from molink.ring.stage import Executing, StageRequests, StageShape
from molink.ring.work import Control, ControlBody, block_copy, block_ids
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data import (
    Admit,
    Grammar,
    History,
    Release,
    SwapIn,
    SwapOut,
    Table,
    Tombstone,
)

#: Sends a control on, with its payload.
PassOn = Callable[[ControlBody, Buffer | None], None]


class ControlApplier:
    """Applies them at one stage, in their order."""

    def __init__(
        self,
        shape: StageShape,
        requests: StageRequests,
        executor: Executing,
        over: Callable[[int], None],
        pass_on: PassOn,
    ) -> None:
        """``over`` is told which request is forgotten."""
        self._shape = shape
        self._requests = requests
        self._executor = executor
        self._over = over
        self._pass_on = pass_on

    def apply(self, controls: Sequence[Control]) -> None:
        """Do what they say here, and pass them on."""
        for control in controls:
            body = control.body
            match body:
                case Admit():
                    self._requests.admit(body)
                    if not self._shape.is_last:
                        self._pass_on(body, None)
                case Grammar() | History():
                    self._for_tail(body, control.data)
                case Table():
                    self._requests.table(body.request, block_ids(body, control.data))
                    self._before_tail(body, control.data)
                case SwapOut() | SwapIn():
                    copy = block_copy(body, control.data)
                    if copy is not None:
                        self._executor.swap(copy)
                    self._before_tail(body, control.data)
                case Release():
                    self._requests.release(body.request)
                    self._over(body.request)
                    self._pass_on(body, None)
                case Tombstone():
                    self._pass_on(body, None)

    def _for_tail(self, body: Grammar | History, data: object) -> None:
        """A grammar, or tokens (``i32``) for that or for penalties: passed on before the tail."""
        if not isinstance(data, bytes | bytearray | memoryview):
            return
        if not self._shape.is_last:
            self._pass_on(body, data)
        elif isinstance(body, Grammar):
            self._requests.grammar(body.request, bytes(data))
        else:
            self._requests.history(body.request, body.first, memoryview(data).cast("B").cast("i"))

    def _before_tail(self, body: Table | SwapOut | SwapIn, data: object) -> None:
        """Blocks (``i32``), which every stage has to know."""
        if not self._shape.is_last and isinstance(data, bytes | bytearray | memoryview):
            self._pass_on(body, data)
