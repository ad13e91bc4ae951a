"""Rotary position embedding, for every kind of scaling.

Two kinds also depend on the sequence length. transformers takes it from the highest position of a
forward; here it is per request, independent of the batch.

``dynamic`` (NTK) uses the length after the forward for all of a request's rows, so

- a prompt prefilled in one chunk equals a full forward in transformers;
- a decoded token at position ``p`` is rotated for length ``p + 1`` while cached keys keep their
  rotation, as in transformers' ``generate`` for one sequence;
- a prompt beyond the original context that is prefilled in several chunks uses the frequencies of
  each chunk's end. Within the original context, chunking doesn't matter.

``longrope`` has other frequencies for sequences beyond the original context, too different to share
a cache. transformers recomputes all keys when a sequence outgrows it. Here a request that may
exceed it (``SequenceRows.max_positions``) uses the second set from its first row on, and the
scheduler shares no blocks between requests of different sets.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.rope import RopeConfig
from molink.stage.batch import SequenceRows
from molink.stage.decoder.image_positions import rotated_positions, shift_after
from molink.stage.device_copy import upload_integers

#: Initial table size in positions; doubled as sequences grow.
_INITIAL_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class AngleTable:
    """Angles ``[n, 1, 2, rotary_dim]`` on the device, at a fixed address.

    The table has ``positions`` positions; if sequences beyond ``short_context`` tokens have other
    angles, these follow. With ``cell``, images shift the positions of the text after them.
    """

    angles: Tensor
    positions: int
    short_context: int
    cell: int = 0

    def row_indices(
        self, positions: "array[int]", sequences: Sequence[SequenceRows]
    ) -> "Sequence[int] | array[int]":
        """Return the table index of each sequence's single row."""
        if self.cell and any(rows.images for rows in sequences):
            shifted = (
                position + shift_after(rows.images, position, self.cell)
                for position, rows in zip(positions, sequences, strict=True)
            )
            return [_clamp(position, self.positions) for position in shifted]
        if len(self.angles) == self.positions:
            return positions
        return [
            position + self.positions * (max(rows.end, rows.max_positions) > self.short_context)
            for position, rows in zip(positions, sequences, strict=True)
        ]


def _clamp(position: int, positions: int) -> int:
    """Clamp a position to the table.

    A scheduler may send invalid image spans, and on a GPU, an index out of range makes all later
    CUDA calls of the process fail.
    """
    return min(max(position, 0), positions - 1)


class Rope:
    """Cosines and sines of rows, ``[T, 1, 2, rotary_dim]``, for :func:`rotate_half`.

    With ``interleaved`` they are for :func:`rotate_pairs`. Tables are computed once in float32 and
    stored in the compute type; ``longrope`` has a second one for long sequences.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        interleaved: bool = False,
        cell: int = 0,
    ) -> None:
        """``cell`` is the side of an image's cells in pixels, if images have M-RoPE positions."""
        #: Permutation of ``[2, 2, T, rotary_dim / 2]`` (cosines or sines, first or second of a
        #: pair).
        self._order = (2, 0, 3, 1) if interleaved else (2, 0, 1, 3)
        self._config, self._dim = config, config.rotary_dim(head_dim)
        self._dtype, self._device = dtype, device
        self._cell = cell if config.axes else 0
        self._frequencies, self._scale = rope_frequencies(config, head_dim)
        self._tables = torch.empty(0)

    def compute_angles(self, positions: Tensor, sequences: Sequence[SequenceRows]) -> Tensor:
        """Return angles of the rows of ``sequences``.

        ``positions`` are the rows' positions, int64 ``[T]`` on the device.
        """
        longest = max(sequence.end for sequence in sequences)
        config = self._config
        if config.kind == "dynamic" and longest > config.original_context:
            per_row = _repeat_per_row(
                [self._dynamic_frequencies(rows.end) for rows in sequences], sequences
            )
            return self._angles_at(positions.cpu(), per_row).to(self._device)
        if self._tables.dim() == 1 or longest > self._tables.shape[1]:
            self._extend_tables(longest)
        if self._cell and any(sequence.images for sequence in sequences):
            return self._angles_of_images(sequences)
        if len(self._tables) == 1:
            return self._tables[0].index_select(0, positions)
        long = [max(rows.end, rows.max_positions) > config.original_context for rows in sequences]
        if all(long) or not any(long):
            return self._tables[int(long[0])].index_select(0, positions)
        chosen = _repeat_per_row([torch.tensor(int(one)) for one in long], sequences).to(
            self._device
        )
        return self._tables[chosen, positions]

    @property
    def table_positions(self) -> int | None:
        """Number of positions that tables can hold; ``None`` means no limit."""
        return self._config.original_context if self._config.kind == "dynamic" else None

    def grow_table(self, longest: int) -> AngleTable | None:
        """Return a table of all positions below ``longest``; ``None`` if length matters, too."""
        config, most = self._config, self.table_positions
        if most is not None and longest > most:
            return None
        if self._tables.dim() == 1 or longest > self._tables.shape[1]:
            self._extend_tables(longest)
        positions = self._tables.shape[1]
        tables = self._tables.flatten(0, 1)
        return AngleTable(tables, positions, config.original_context, self._cell)

    def _angles_of_images(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Return angles of rows whose pairs are rotated by an image's position, row or column."""
        numbers = [
            _clamp(number, sequence.end)
            for sequence in sequences
            for places in rotated_positions(sequence, self._cell)
            for number in places
        ]
        found = self._tables[0][upload_integers(numbers, self._device).view(-1, 3)]
        axes = torch.tensor(self._config.axes).repeat(2).to(self._device)
        return found.gather(1, axes.view(1, 1, 1, 1, -1).expand(len(found), 1, *found.shape[2:]))[
            :, 0
        ]

    def _extend_tables(self, longest: int) -> None:
        size = max(_INITIAL_POSITIONS, 1 << (longest - 1).bit_length())
        positions = torch.arange(size)
        tables = [self._angles_at(positions, row) for row in self._frequencies]
        self._tables = torch.stack(tables).to(self._device)

    def _angles_at(self, positions: Tensor, per_row: Tensor) -> Tensor:
        radians = positions[:, None].float() * per_row
        cos, sin = radians.cos() * self._scale, radians.sin() * self._scale
        # Sines carry the sign, so that rotation is a plain swap of each pair.
        both = torch.stack((cos, cos, -sin, sin)).view(2, 2, *radians.shape).permute(self._order)
        return both.reshape(len(positions), 1, 2, self._dim).to(self._dtype)

    def _dynamic_frequencies(self, length: int) -> Tensor:
        config, dim = self._config, self._dim
        if length <= config.original_context:
            return self._frequencies[0]
        stretch = config.factor * length / config.original_context - (config.factor - 1)
        return _plain_frequencies(config.theta * stretch ** (dim / (dim - 2)), dim)


def _repeat_per_row(values: list[Tensor], sequences: Sequence[SequenceRows]) -> Tensor:
    """Repeat each sequence's value for its rows."""
    counts = torch.tensor([rows.count for rows in sequences])
    return torch.stack(values).repeat_interleave(counts, dim=0)


#: Rotates ``heads`` (``[T, n, head_dim]``) in place, like :func:`rotate_half`.
Rotate = Callable[[Tensor, Tensor], None]


def rotate_half(heads: Tensor, angles: Tensor) -> None:
    """Rotate the first dimensions of ``heads`` (``[T, n, head_dim]``) in place."""
    dim = angles.shape[-1]
    if dim != heads.shape[-1]:
        heads = heads[..., :dim]
    cos, sin = angles.unbind(2)
    swapped = heads.roll(dim // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def rotate_pairs(heads: Tensor, angles: Tensor) -> None:
    """Like :func:`rotate_half` (same shapes), but for interleaved pairs."""
    heads = heads[..., : angles.shape[-1]]
    cos, sin = angles.unbind(2)
    swapped = torch.stack((heads[..., 1::2], heads[..., 0::2]), dim=-1).flatten(-2)
    heads.mul_(cos).addcmul_(swapped, sin)


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return radians per position of each pair, and the scale of cos and sin.

    The radians are float32 ``[n, rotary_dim / 2]``: two rows (short and long sequences) for
    ``longrope``, otherwise one. For ``dynamic`` they apply within the original context.
    """
    dim = config.rotary_dim(head_dim)
    plain = _plain_frequencies(config.theta, dim)
    scale = 1.0
    if config.kind == "proportional":
        turned = int(config.partial_rotary_factor * head_dim // 2)
        plain = torch.cat((plain[:turned], torch.zeros(dim // 2 - turned))) / config.factor
    elif config.kind == "linear":
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
    """Divide low frequencies by the factor, keep high ones, and blend between."""
    low, high, length = config.low_freq_factor, config.high_freq_factor, config.original_context
    wavelengths = 2 * math.pi / plain
    # If both are equal, as in Llama 4, there is no range to blend.
    blend = (length / wavelengths - low) / ((high - low) or 1.0)
    blended = (1 - blend) * plain / config.factor + blend * plain
    longer = torch.where(wavelengths > length / low, plain / config.factor, blended)
    return torch.where(wavelengths < length / high, plain, longer)


def _yarn_frequencies(config: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from kept to divided frequencies."""

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
