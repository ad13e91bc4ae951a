"""Encodes images beside the steps of a stage, on threads of their own.

A step must not wait for a vision tower: it would seem to hang, and others' tokens would be late.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from molink.facts.images import CHANNELS, ImageInput
from molink.stage.stage import Stage
from molinkd.worker.engine import EncodedImages, HandOver

log = logging.getLogger(__name__)

#: Rows of images kept for later requests, in bytes: those of a conversation come with each turn.
KEPT_ROW_BYTES = 64 << 20


class ImageEncoder:
    """Runs a stage's vision tower on one image at a time; keeps the rows used last."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def encode_images(
        self,
        images: Sequence[ImageInput],
        hand_over: HandOver,
        done: Callable[[EncodedImages], None],
    ) -> None:
        """Encode ``images``; ``hand_over(done, result)`` is called on the thread."""
        arguments = tuple(images), hand_over, done
        threading.Thread(
            target=self.run_encoding, args=arguments, name="vision", daemon=True
        ).start()

    def run_encoding(
        self,
        images: Sequence[ImageInput],
        hand_over: HandOver,
        done: Callable[[EncodedImages], None],
    ) -> None:
        """As :meth:`encode_images`, on this thread."""
        result: EncodedImages
        try:
            result = [self._encode(image) for image in images]
        except Exception as error:
            log.exception("images could not be encoded")
            result = f"{type(error).__name__}: {error}"
        try:
            hand_over(done, result)
        except RuntimeError:
            log.debug("the event loop has ended before images were encoded")

    def _encode(self, image: ImageInput) -> Tensor:
        """Rows ``[n, hidden]`` of an image, on the host."""
        with self._lock:
            return self._encode_locked(image)

    def _encode_locked(self, image: ImageInput) -> Tensor:
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
