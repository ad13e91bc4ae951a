"""Rotary position embedding: the angles of each row, for every kind of scaling.

``dynamic`` (NTK) makes the frequencies depend on the sequence's length, which transformers takes to
be the highest position of a forward plus one. Here that is taken per request: all rows of a
request in one forward use the length it has after that forward, so

- a prompt that is prefilled in one chunk gets what a full forward in transformers gives;
- a decoded token at position ``p`` is rotated for length ``p + 1`` while the cached keys keep the
  rotation of their own time, which is what ``generate`` in transformers does for one sequence;
- a prompt longer than the original context that is prefilled in several chunks gets, per chunk,
  the frequencies of that chunk's end. Up to the original context nothing depends on the chunking.

Other requests in the batch never matter. All other kinds depend on the position alone.
"""

import math

import torch
from torch import Tensor

from molink.model.rope import RopeConfig

#: Positions for which angles are computed at first; doubled as sequences grow.
_FIRST_TABLE = 1024


class Rope:
    """Cosines and sines of rows, as ``[T, 1, 2, head_dim]`` for :func:`rotate`.

    Tables are made once per position, in float32, and kept in the type of computation.
    """

    __slots__ = ("_config", "_device", "_dtype", "_frequencies", "_head_dim", "_scale", "_table")

    def __init__(
        self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._head_dim = config, head_dim
        self._dtype, self._device = dtype, device
        self._frequencies, self._scale = frequencies(config, head_dim)
        self._table = torch.empty(0, 1, 2, head_dim, dtype=dtype, device=device)

    def angles(self, positions: Tensor, lengths: list[int], counts: list[int]) -> Tensor:
        """Angles of rows at ``positions`` (int64 ``[T]``, on the device).

        ``lengths`` is each sequence's tokens after this forward, ``counts`` its rows in it.
        """
        longest = max(lengths)
        config = self._config
        if config.kind == "dynamic" and longest > config.original_context:
            per_length = [self._dynamic(length) for length in lengths]
            rows = torch.stack(per_length).repeat_interleave(torch.tensor(counts), dim=0)
            return self._turn(positions.cpu(), rows).to(self._device)
        if longest > len(self._table):
            self._grow(longest)
        return self._table.index_select(0, positions)

    def _grow(self, longest: int) -> None:
        size = max(_FIRST_TABLE, 1 << (longest - 1).bit_length())
        self._table = self._turn(torch.arange(size), self._frequencies).to(self._device)

    def _turn(self, positions: Tensor, per_row: Tensor) -> Tensor:
        turns = positions[:, None].float() * per_row
        cos, sin = turns.cos() * self._scale, turns.sin() * self._scale
        # The sign of rotate_half is kept in the sines: it then is a plain swap of halves.
        both = torch.cat((cos, cos, -sin, sin), dim=-1)
        return both.view(len(positions), 1, 2, self._head_dim).to(self._dtype)

    def _dynamic(self, length: int) -> Tensor:
        config, dim = self._config, self._head_dim
        if length <= config.original_context:
            return self._frequencies
        stretch = config.factor * length / config.original_context - (config.factor - 1)
        return _plain(config.theta * stretch ** (dim / (dim - 2)), dim)


def rotate(heads: Tensor, angles: Tensor) -> None:
    """Turn ``heads`` (``[T, n, head_dim]``) in place by the rows' angles."""
    cos, sin = angles.unbind(2)
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each pair (float32 ``[head_dim / 2]``), and the scale of cos and sin.

    For ``dynamic`` these are the frequencies within the original context.
    """
    plain = _plain(config.theta, head_dim)
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim), _yarn_scale(config)
    return plain, 1.0


def _plain(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    low, high, length = config.low_freq_factor, config.high_freq_factor, config.original_context
    wavelengths = 2 * math.pi / plain
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / config.factor + blend * plain
    longer = torch.where(wavelengths > length / low, plain / config.factor, blended)
    return torch.where(wavelengths < length / high, plain, longer)


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions from kept to divided frequencies."""

    def dimension(rotations: float) -> float:
        ratio = config.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
