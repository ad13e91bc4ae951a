"""Rotary position embedding: the angles of each row, for every kind of scaling.

Two kinds depend on the length of a sequence too, which transformers takes to be the highest
position of a forward plus one. Here that is taken per request; others in the batch never matter.

``dynamic`` (NTK) lets all rows of a request in one forward use the length it has after it, so

- a prompt that is prefilled in one chunk gets what a full forward in transformers gives;
- a decoded token at position ``p`` is rotated for length ``p + 1`` while the cached keys keep the
  rotation of their own time, which is what ``generate`` in transformers does for one sequence;
- a prompt longer than the original context that is prefilled in several chunks gets, per chunk,
  the frequencies of that chunk's end. Up to the original context nothing depends on the chunking.

``longrope`` has one set of frequencies for sequences that fit the original context and another for
longer ones, too different for one cache. transformers decides anew in each forward and, when a
sequence outgrows the original context, computes all its keys again. Here a request that may reach
beyond it (``SequenceRows.reach``) uses the second set from its first row on. Its head says so, and
has requests of one set share no blocks with those of the other.

All other kinds depend on the position alone.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.rope import RopeConfig
from molink.stage.batch import SequenceRows

#: Positions for which angles are computed at first; doubled as sequences grow.
_INITIAL_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class AngleTable:
    """Angles ``[n, 1, 2, rotary_dim]`` on the device, which stay where they are in memory.

    Those of ``positions`` positions; where sequences of more than ``short_context`` tokens have
    others, these follow.
    """

    angles: Tensor
    positions: int
    short_context: int

    def row_indices(
        self, positions: "array[int]", sequences: Sequence[SequenceRows]
    ) -> "Sequence[int] | array[int]":
        """Where the angles of each row are, one of each sequence."""
        if len(self.angles) == self.positions:
            return positions
        return [
            position + self.positions * (max(rows.end, rows.max_positions) > self.short_context)
            for position, rows in zip(positions, sequences, strict=True)
        ]


class Rope:
    """Cosines and sines of rows, as ``[T, 1, 2, rotary_dim]`` for :func:`rotate_half`.

    Those for :func:`rotate_pairs` are ``interleaved``. Tables are made once per position, in
    float32, and kept in the type of computation: one, or two for ``longrope``, of which the second
    is for long sequences.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        interleaved: bool = False,
    ) -> None:
        #: Of ``[2, 2, T, rotary_dim / 2]``: cosines and sines, for the first and second of pairs.
        self._order = (2, 0, 3, 1) if interleaved else (2, 0, 1, 3)
        self._config, self._dim = config, config.rotary_dim(head_dim)
        self._dtype, self._device = dtype, device
        self._frequencies, self._scale = rope_frequencies(config, head_dim)
        self._tables = torch.empty(0)

    def compute_angles(self, positions: Tensor, sequences: Sequence[SequenceRows]) -> Tensor:
        """Angles of the rows of ``sequences``, at ``positions`` (int64 ``[T]``, on the device)."""
        longest = max(sequence.end for sequence in sequences)
        config = self._config
        if config.kind == "dynamic" and longest > config.original_context:
            per_row = _repeat_per_row(
                [self._dynamic_frequencies(rows.end) for rows in sequences], sequences
            )
            return self._angles_at(positions.cpu(), per_row).to(self._device)
        if self._tables.dim() == 1 or longest > self._tables.shape[1]:
            self._extend_tables(longest)
        if len(self._tables) == 1:
            return self._tables[0].index_select(0, positions)
        long = [max(rows.end, rows.max_positions) > config.original_context for rows in sequences]
        if all(long) or not any(long):
            return self._tables[int(long[0])].index_select(0, positions)
        chosen = _repeat_per_row([torch.tensor(int(one)) for one in long], sequences).to(
            self._device
        )
        return self._tables[chosen, positions]

    def grow_table(self, longest: int) -> AngleTable | None:
        """Angles of all positions below ``longest``; ``None`` if the position doesn't tell them."""
        config = self._config
        if config.kind == "dynamic" and longest > config.original_context:
            return None
        if self._tables.dim() == 1 or longest > self._tables.shape[1]:
            self._extend_tables(longest)
        positions = self._tables.shape[1]
        return AngleTable(self._tables.flatten(0, 1), positions, config.original_context)

    def _extend_tables(self, longest: int) -> None:
        size = max(_INITIAL_POSITIONS, 1 << (longest - 1).bit_length())
        positions = torch.arange(size)
        tables = [self._angles_at(positions, row) for row in self._frequencies]
        self._tables = torch.stack(tables).to(self._device)

    def _angles_at(self, positions: Tensor, per_row: Tensor) -> Tensor:
        turns = positions[:, None].float() * per_row
        cos, sin = turns.cos() * self._scale, turns.sin() * self._scale
        # The sign of the turn is kept in the sines: it then is a plain swap of each pair.
        both = torch.stack((cos, cos, -sin, sin)).view(2, 2, *turns.shape).permute(self._order)
        return both.reshape(len(positions), 1, 2, self._dim).to(self._dtype)

    def _dynamic_frequencies(self, length: int) -> Tensor:
        config, dim = self._config, self._dim
        if length <= config.original_context:
            return self._frequencies[0]
        stretch = config.factor * length / config.original_context - (config.factor - 1)
        return _plain_frequencies(config.theta * stretch ** (dim / (dim - 2)), dim)


def _repeat_per_row(values: list[Tensor], sequences: Sequence[SequenceRows]) -> Tensor:
    """A value for each sequence → one for each row."""
    counts = torch.tensor([rows.count for rows in sequences])
    return torch.stack(values).repeat_interleave(counts, dim=0)


#: Turns ``heads`` (``[T, n, head_dim]``) in place by angles, as :func:`rotate`.
Rotate = Callable[[Tensor, Tensor], None]


def rotate_half(heads: Tensor, angles: Tensor) -> None:
    """Turn ``heads`` (``[T, n, head_dim]``) in place, as many dimensions as the angles have."""
    dim = angles.shape[-1]
    if dim != heads.shape[-1]:
        heads = heads[..., :dim]
    cos, sin = angles.unbind(2)
    swapped = heads.roll(dim // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def rotate_pairs(heads: Tensor, angles: Tensor) -> None:
    """As :func:`rotate_half`, where the two dimensions that are turned together are neighbours."""
    heads = heads[..., : angles.shape[-1]]
    cos, sin = angles.unbind(2)
    swapped = torch.stack((heads[..., 1::2], heads[..., 0::2]), dim=-1).flatten(-2)
    heads.mul_(cos).addcmul_(swapped, sin)


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, and the scale of cos and sin.

    They are float32 ``[n, rotary_dim / 2]``: for ``longrope`` two rows, those of short and of long
    sequences, else one. For ``dynamic`` it is that within the original context.
    """
    dim = config.rotary_dim(head_dim)
    plain = _plain_frequencies(config.theta, dim)
    scale = 1.0
    if config.kind == "linear":
        plain = plain / config.factor
    elif config.kind == "llama3":
        plain = _llama3_frequencies(config, plain)
    elif config.kind == "yarn":
        plain, scale = _yarn_frequencies(config, plain, dim), _yarn_scale(config)
    elif config.kind == "longrope":
        divisors = torch.tensor([config.short_factor, config.long_factor])
        plain, scale = _plain_frequencies(config.theta, dim, divisors), _longrope_scale(config)
    return plain.view(-1, dim // 2), scale


def _plain_frequencies(theta: float, dim: int, divisors: Tensor | float = 1.0) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    result: Tensor = 1.0 / (divisors * theta**exponents)
    return result


def _llama3_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    low, high, length = config.low_freq_factor, config.high_freq_factor, config.original_context
    wavelengths = 2 * math.pi / plain
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / config.factor + blend * plain
    longer = torch.where(wavelengths > length / low, plain / config.factor, blended)
    return torch.where(wavelengths < length / high, plain, longer)


def _yarn_frequencies(config: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions from kept to divided frequencies."""

    def dimension(rotations: float) -> float:
        ratio = config.original_context / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(dim // 2, dtype=torch.float32)
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


def _longrope_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_context))
