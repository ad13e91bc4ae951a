"""Rows in 8 bits per element: one scale per row, its largest magnitude, and signed bytes.

A frame has n scales (f32), then n x hidden bytes. An element is ``byte / 127 * scale``, with an
error of at most half of ``scale / 127`` (and the rounding of its type). Rows of zeros are exact. A
row with a NaN or an infinity, which marks a failed request, becomes a row of NaN.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from molink.wire.messages.base import Payload

_SCALE = np.dtype("<f4")
#: The largest magnitude of a signed byte with both signs.
_STEPS = np.float32(127)
_NAN_BF16 = 0x7FC0

Floats = npt.NDArray[np.float32]


def packed_bytes(payload: Payload) -> int:
    """Return the bytes of rows ``payload.shape`` in 8 bits."""
    rows, hidden = payload.shape
    return rows * (_SCALE.itemsize + hidden)


def to_int8(rows: memoryview, payload: Payload) -> bytes:
    """Convert plain rows to 8 bits per element."""
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
    """Convert back to plain rows; ``packed`` has :func:`packed_bytes` bytes, of any content."""
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
        # Round to nearest, ties to even; the lower half is cut off below.
        rounded: npt.NDArray[Any] = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        rounded[np.isnan(floats)] = _NAN_BF16
        return rounded.astype("<u2")
    return floats.astype("<f2") if dtype == "f16" else floats
