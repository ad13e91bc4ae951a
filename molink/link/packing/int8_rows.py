"""Rows in 8 bits per element: a scale per row, the largest magnitude in it, and signed bytes.

A frame holds the n scales (f32), then n x hidden bytes. An element is ``byte / 127 * scale``, off
by half of ``scale / 127`` at most (and by the rounding of its type). Rows of zeros are exact. A row
with a NaN or an infinity, which marks a request that failed, becomes a row of NaN.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from molink.wire.messages.base import Payload

_SCALE = np.dtype("<f4")
#: The largest magnitude that a signed byte has on both sides of 0.
_STEPS = np.float32(127)
#: The quiet NaN of bf16.
_NAN_BF16 = 0x7FC0

Floats = npt.NDArray[np.float32]


def packed_bytes(payload: Payload) -> int:
    """Size in bytes of rows ``payload.shape`` in 8 bits."""
    rows, hidden = payload.shape
    return rows * (_SCALE.itemsize + hidden)


def to_int8(rows: memoryview, payload: Payload) -> bytes:
    """The bytes of plain rows in 8 bits per element."""
    with np.errstate(all="ignore"):
        floats = _floats(rows, payload.dtype).reshape(payload.shape)
        scale = np.abs(floats).max(axis=1, initial=0)
        usable = np.isfinite(scale) & (scale > 0)
        steps = floats / np.where(usable, scale, np.float32(1))[:, None]
        steps *= _STEPS
        np.rint(steps, out=steps)
        steps[~usable] = 0
        scale[~np.isfinite(scale)] = np.nan
        return b"".join((scale.astype(_SCALE).data, steps.astype(np.int8).data))


def to_rows(packed: memoryview, payload: Payload) -> memoryview:
    """The bytes of plain rows; ``packed`` has :func:`packed_bytes` bytes of any content."""
    split = payload.shape[0] * _SCALE.itemsize
    with np.errstate(all="ignore"):
        scale = np.frombuffer(packed[:split], _SCALE)
        steps = np.frombuffer(packed[split:], np.int8).reshape(payload.shape)
        floats = steps.astype(np.float32)
        floats /= _STEPS
        floats *= scale[:, None]
        floats[~np.isfinite(scale)] = np.nan
        words = _words(floats, payload.dtype)
    return words.data.cast("B")


def _floats(rows: memoryview, dtype: str) -> Floats:
    if dtype == "bf16":
        words = np.frombuffer(rows, "<u2").astype("<u4")
        words <<= 16
        return words.view(np.float32)
    if dtype == "f16":
        return np.frombuffer(rows, "<f2").astype(np.float32)
    return np.frombuffer(rows, "<f4")


def _words(floats: Floats, dtype: str) -> npt.NDArray[Any]:
    if dtype == "bf16":
        bits = floats.view("<u4")
        # To the nearest, ties to even: the lower half is cut off after it.
        rounded: npt.NDArray[Any] = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        rounded[np.isnan(floats)] = _NAN_BF16
        return rounded.astype("<u2")
    return floats.astype("<f2") if dtype == "f16" else floats
