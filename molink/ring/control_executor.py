"""Applies control messages at a stage and forwards them."""

from collections.abc import Callable, Sequence

from molink.ring.stage import StageRequests, StageShape, StepExecutor
from molink.ring.step import CompletedControl, ControlMessage, parse_block_copy, parse_block_ids
from molink.wire.messages.codec import Buffer
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Grammar,
    History,
    PromptImages,
    Release,
    SwapIn,
    SwapOut,
    Tombstone,
)

#: Forwards a control message with its payload to the next stage.
ForwardControl = Callable[[ControlMessage, Buffer | None], None]


class ControlExecutor:
    """Applies completed control messages of one stage in order."""

    def __init__(
        self,
        shape: StageShape,
        requests: StageRequests,
        executor: StepExecutor,
        on_released: Callable[[int], None],
        forward: ForwardControl,
    ) -> None:
        """``on_released`` gets the id of each released request."""
        self._shape = shape
        self._requests = requests
        self._executor = executor
        self._on_released = on_released
        self._forward = forward

    def apply_controls(self, controls: Sequence[CompletedControl]) -> None:
        """Apply messages at this stage and forward them."""
        for control in controls:
            body = control.body
            match body:
                case Admit():
                    self._requests.admit_request(body)
                    if not self._shape.is_last:
                        self._forward(body, None)
                case Grammar() | History():
                    self._apply_or_forward(body, control.data)
                case PromptImages():
                    self._requests.set_images(body.request, body.spans, control.data)
                    if not self._shape.is_last:
                        self._forward(body, None)
                case BlockTable():
                    self._requests.append_blocks(body.request, parse_block_ids(body, control.data))
                    self._forward_blocks(body, control.data)
                case SwapOut() | SwapIn():
                    copy = parse_block_copy(body, control.data)
                    if copy is not None:
                        self._executor.submit_copy(copy)
                    self._forward_blocks(body, control.data)
                case Release():
                    self._requests.release_request(body.request)
                    self._on_released(body.request)
                    self._forward(body, None)
                case Tombstone():
                    self._forward(body, None)

    def _apply_or_forward(self, body: Grammar | History, data: object) -> None:
        """Apply a grammar or token history (``i32``) at the last stage, forward it at others."""
        if not isinstance(data, bytes | bytearray | memoryview):
            return
        if not self._shape.is_last:
            self._forward(body, data)
        elif isinstance(body, Grammar):
            self._requests.set_grammar(body.request, bytes(data))
        else:
            self._requests.add_history(
                body.request, body.first, memoryview(data).cast("B").cast("i")
            )

    def _forward_blocks(self, body: BlockTable | SwapOut | SwapIn, data: object) -> None:
        """Forward block ids (``i32``), which every stage needs."""
        if not self._shape.is_last and isinstance(data, bytes | bytearray | memoryview):
            self._forward(body, data)
