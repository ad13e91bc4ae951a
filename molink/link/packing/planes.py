"""Splits elements of rows into byte planes and joins them."""

from typing import Any

import numpy as np
import numpy.typing as npt

#: By element size, the planes of a rotated element (shift and type); the top byte's plane is last.
_PLANES: dict[int, tuple[tuple[int, np.dtype[Any]], ...]] = {
    2: ((0, np.dtype("u1")), (8, np.dtype("u1"))),
    4: ((0, np.dtype("<u2")), (16, np.dtype("u1")), (24, np.dtype("u1"))),
}
_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

Words = npt.NDArray[Any]


class BytePlanes:
    """Rotates each element left by one bit and separates its top byte.

    Reuses its memory, since fresh arrays cost more in page faults than the computation. Results are
    valid until the next call.
    """

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` bounds the elements of one call."""
        self._result = np.empty(max_bytes, np.uint8)
        self._rotated = np.empty(max_bytes, np.uint8)
        self._scratch = np.empty(max_bytes, np.uint8)

    def split_planes(self, data: memoryview, size: int) -> tuple[memoryview, memoryview]:
        """Split elements of ``size`` (2 or 4) bytes into their top bytes and the other bytes."""
        words = np.frombuffer(data, _WORDS[size])
        rotated, scratch = self._words(words)
        np.left_shift(words, 1, out=rotated)
        np.right_shift(words, size * 8 - 1, out=scratch)
        np.bitwise_or(rotated, scratch, out=rotated)
        at, count = 0, len(words)
        for shift, kind in _PLANES[size]:
            end = at + count * kind.itemsize
            source = np.right_shift(rotated, shift, out=scratch) if shift else rotated
            np.copyto(self._result[at:end].view(kind), source, casting="unsafe")
            at = end
        result, low = self._result.data, count * (size - 1)
        return result[low:at], result[:low]

    def join_planes(self, tops: bytes, others: memoryview, size: int) -> memoryview:
        """Join the ``len(tops)`` elements that :meth:`split_planes` split."""
        words = self._result[: len(tops) * size].view(_WORDS[size])
        rotated, scratch = self._words(words)
        rotated[:] = 0
        at = 0
        for shift, kind in _PLANES[size][:-1]:
            end = at + len(tops) * kind.itemsize
            self._add(rotated, scratch, np.frombuffer(others[at:end], kind), shift)
            at = end
        self._add(rotated, scratch, np.frombuffer(tops, np.uint8), size * 8 - 8)
        np.right_shift(rotated, 1, out=words)
        np.left_shift(rotated, size * 8 - 1, out=scratch)
        np.bitwise_or(words, scratch, out=words)
        return self._result.data[: len(tops) * size]

    def _words(self, like: Words) -> tuple[Words, Words]:
        return (
            self._rotated[: like.nbytes].view(like.dtype),
            self._scratch[: like.nbytes].view(like.dtype),
        )

    @staticmethod
    def _add(rotated: Words, scratch: Words, plane: Words, shift: int) -> None:
        np.copyto(scratch, plane)
        np.left_shift(scratch, shift, out=scratch)
        np.bitwise_or(rotated, scratch, out=rotated)
