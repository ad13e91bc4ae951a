"""Encodes images beside the steps of a stage, on a thread of its own.

A step must not wait for a vision tower: it would seem to hang, and others' tokens would be late.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.facts.images import CHANNELS, ImageInput
from molink.stage.stage import Stage
from molinkd.worker.engine import EncodedImages, HandOver

log = logging.getLogger(__name__)

#: Rows of images kept for later requests, in bytes: those of a conversation come with each turn.
KEPT_ROW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Encoding:
    images: Sequence[ImageInput]
    is_wanted: Callable[[], bool]
    hand_over: HandOver
    done: Callable[[EncodedImages], None]


class ImageEncoder:
    """Runs a stage's vision tower on one image at a time; keeps the rows used last.

    Its thread lives while there are images to encode.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._kept_bytes = 0
        #: Guards what waits, and whether a thread runs it.
        self._lock = threading.Lock()
        self._waiting: deque[_Encoding] = deque()
        self._is_running = False

    def encode_images(
        self,
        images: Sequence[ImageInput],
        is_wanted: Callable[[], bool],
        hand_over: HandOver,
        done: Callable[[EncodedImages], None],
    ) -> None:
        """Encode ``images``; ``hand_over(done, result)`` is called on the thread.

        So is ``is_wanted()`` before each image; once it is false, the result is an error.
        """
        with self._lock:
            self._waiting.append(_Encoding(images, is_wanted, hand_over, done))
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run_encodings, name="vision", daemon=True).start()

    def encode_now(
        self, images: Sequence[ImageInput], is_wanted: Callable[[], bool] = lambda: True
    ) -> EncodedImages:
        """As :meth:`encode_images`, but on the calling thread; no other may encode meanwhile."""
        rows = []
        try:
            for image in images:
                if not is_wanted():
                    return "its request has ended"
                rows.append(self._encode(image))
        except Exception as error:
            log.exception("images could not be encoded")
            return f"{type(error).__name__}: {error}"
        return rows

    def _run_encodings(self) -> None:
        while (encoding := self._next_encoding()) is not None:
            result = self.encode_now(encoding.images, encoding.is_wanted)
            try:
                encoding.hand_over(encoding.done, result)
            except RuntimeError:
                log.debug("the event loop has ended before images were encoded")

    def _next_encoding(self) -> _Encoding | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._is_running = False
            return None

    def _encode(self, image: ImageInput) -> Tensor:
        """Rows ``[n, hidden]`` of an image, on the host."""
        key = image.digest
        if key in self._rows:
            self._rows.move_to_end(key)
            return self._rows[key]
        shape = image.span.height, image.span.width, CHANNELS
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(shape)
        rows = self._stage.encode_image(pixels).cpu()
        self._rows[key] = rows
        self._kept_bytes += rows.nbytes
        while self._kept_bytes > KEPT_ROW_BYTES:
            _, oldest = self._rows.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        return rows
