"""Slots for requests' states in recurrent layers, in addition to the KV pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.recurrent import RecurrentShape
from molink.errors import InvariantError
from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_integers


def slot_bytes(shape: RecurrentShape | None, layers: int) -> int:
    """Return the bytes of a slot over ``layers`` recurrent layers."""
    return 0 if shape is None else layers * shape.state_elements * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step by request.

    ``single_rows`` and ``single_slots`` (int64 ``[B]``, on the device) belong to requests with one
    row; ``sole_slot`` is the slot if there is exactly one such request. ``chunks`` has first row,
    number of rows and slot of each other request.
    """

    single_rows: Tensor
    single_slots: Tensor
    sole_slot: int | None
    chunks: tuple[tuple[int, int, int], ...]


class StatePool:
    """``slots`` float32 slots for requests' states in ``layers`` recurrent layers.

    A request keeps its slot from its first row to its release, and all layers use the same slot.
    States change with each row, so a request's rows must come in order, each once. Other slots hold
    copies for the prefix cache; the scheduler assigns all slots.
    """

    def __init__(
        self, shape: RecurrentShape, layers: int, slots: int, device: torch.device
    ) -> None:
        self.slots = slots
        self._device = device
        #: By layer and slot: the last rows of convolutions, ``[conv_width - 1, channels]``, and
        #: memories (sums of keys times values), ``[value_heads, key_dim, value_dim]``, if the
        #: layers have them.
        self.conv_rows = torch.zeros(layers, slots, *shape.conv_shape, device=device)
        self.memories = torch.zeros(layers, slots, *shape.memory_shape, device=device)

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero the states of slots in all layers, for requests that start."""
        for slot in slots:
            self.conv_rows[:, slot] = 0
            self.memories[:, slot] = 0

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the state of slot ``source`` in all layers to slot ``target``.

        Raises:
            InvariantError: there is no such slot.
        """
        self._check_slots((source, target))
        self.conv_rows[:, target] = self.conv_rows[:, source]
        self.memories[:, target] = self.memories[:, source]

    def locate_rows(self, sequences: Sequence[SequenceRows]) -> StateRows:
        """Divide a step's rows, and clear the slots of requests that start.

        Sequences of different requests have different slots.

        Raises:
            InvariantError: there is no such slot.
        """
        self._check_slots([sequence.state_slot for sequence in sequences])
        self.clear_slots([sequence.state_slot for sequence in sequences if sequence.start == 0])
        rows, slots, chunks, first = [], [], [], 0
        for sequence in sequences:
            if sequence.count == 1:
                rows.append(first)
                slots.append(sequence.state_slot)
            else:
                chunks.append((first, sequence.count, sequence.state_slot))
            first += sequence.count
        both = upload_integers(rows + slots, self._device)
        sole = slots[0] if len(slots) == 1 else None
        return StateRows(both[: len(rows)], both[len(rows) :], sole, tuple(chunks))

    def _check_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.slots:
                raise InvariantError(f"state {slot} is not in a pool of {self.slots}")
