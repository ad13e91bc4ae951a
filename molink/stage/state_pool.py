"""Slots for requests' states in recurrent layers, in addition to the KV pool.

A step may have rows of drafts, which are wrong if another token is sampled. They don't change the
slot's state: the slot keeps their inputs, and the request's next rows first repeat those drafts
that were right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from molink.checkpoint.recurrent import RecurrentShape
from molink.errors import InvariantError
from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_integers


def slot_bytes(shape: RecurrentShape | None, layers: int) -> int:
    """Return the bytes of a slot over ``layers`` recurrent layers."""
    return 0 if shape is None else layers * shape.slot_elements * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class RowRounds:
    """Rows of several requests, one of each per round.

    ``slots`` (int64 ``[B]``, on the device) belong to the requests, those with most rows first;
    ``rounds[i]`` (int64, on the device) are the rows ``i`` of the first ones. ``sole_slot`` is the
    slot if there is exactly one request.
    """

    slots: Tensor
    rounds: tuple[Tensor, ...]
    sole_slot: int | None


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step by request, followed by repeated rows.

    ``certain`` are repeated and single rows, ``chunks`` first row, number of rows and slot of each
    chunk, and ``drafts`` the rows after these that may be wrong. ``repeated_places`` (int64
    ``[R]``, on the device) are places of repeated rows in :attr:`StatePool.draft_inputs`, if any;
    the inputs of rows ``draft_rows`` are stored to ``draft_places``.
    """

    certain: RowRounds
    chunks: tuple[tuple[int, int, int], ...]
    drafts: RowRounds
    repeated_places: Tensor
    draft_rows: Tensor
    draft_places: Tensor


@dataclass(slots=True)
class _RequestRows:
    """Rows of one request in a step; ``first_place`` is the place of its first draft."""

    slot: int
    first_place: int
    certain: list[int] = field(default_factory=list)
    chunk: tuple[int, int, int] | None = None
    drafts: list[int] = field(default_factory=list)


class StatePool:
    """``slots`` float32 slots for requests' states in ``layers`` recurrent layers.

    A request keeps its slot from its first row to its release, and all layers use the same slot.
    Rows change states, so a request's rows must come in order, and only drafts may come twice.
    Other slots hold copies for the prefix cache; the scheduler assigns all slots.
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
        self._max_drafts, size = shape.drafts_shape
        #: By layer: inputs of each slot's latest drafts, ``[slots * max_drafts, input_size]``.
        self.draft_inputs = torch.zeros(layers, slots * self._max_drafts, size, device=device)
        #: By slot: the number of tokens that its state has seen, and of drafts after them.
        self._positions = [0] * slots
        self._num_drafts = [0] * slots

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.conv_rows.nbytes + self.memories.nbytes + self.draft_inputs.nbytes

    def has_state(self, slot: int, position: int) -> bool:
        """Whether a slot has the state after ``position`` tokens, the latest drafts included.

        Every request may start at position 0.
        """
        return position == 0 or 0 <= position - self._positions[slot] <= self._num_drafts[slot]

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the state of slot ``source`` in all layers to slot ``target``.

        Raises:
            InvariantError: there is no such slot.
        """
        self._check_slots((source, target))
        self.conv_rows[:, target] = self.conv_rows[:, source]
        self.memories[:, target] = self.memories[:, source]
        count, before, after = self._num_drafts[source], *map(self._first_place, (source, target))
        drafts = self.draft_inputs[:, before : before + count]
        self.draft_inputs[:, after : after + count] = drafts
        self._positions[target], self._num_drafts[target] = self._positions[source], count

    def locate_rows(self, sequences: Sequence[SequenceRows]) -> StateRows:
        """Divide a step's rows, and clear the slots of requests that start.

        Sequences of different requests have different slots. Drafts follow another row of their
        request; they are the only rows from which the next step may go back.

        Raises:
            InvariantError: there is no such slot, or too many drafts.
        """
        self._check_slots([sequence.state_slot for sequence in sequences])
        total = sum(sequence.count for sequence in sequences)
        requests, repeated, first = list[_RequestRows](), list[int](), 0
        for sequence in sequences:
            if sequence.is_draft:
                self._add_draft(requests[-1], first)
            else:
                requests.append(self._add_rows(sequence, first, total, repeated))
            first += sequence.count
        return self._upload_rows(requests, repeated)

    def _add_rows(
        self, sequence: SequenceRows, first: int, total: int, repeated: list[int]
    ) -> _RequestRows:
        """Locate a request's first rows in a step of ``total`` rows.

        Places of drafts that precede them are added to ``repeated``.
        """
        slot = sequence.state_slot
        if sequence.start == 0:
            self._clear_slot(slot)
        found = _RequestRows(slot, self._first_place(slot))
        # The rows of a failed request may follow an unknown state.
        again = sequence.start - self._positions[slot]
        if self.has_state(slot, sequence.start):
            found.certain += range(total + len(repeated), total + len(repeated) + again)
            repeated += range(found.first_place, found.first_place + again)
        if sequence.count == 1:
            found.certain.append(first)
        else:
            found.chunk = first, sequence.count, slot
        self._positions[slot], self._num_drafts[slot] = sequence.end, 0
        return found

    def _add_draft(self, found: _RequestRows, row: int) -> None:
        found.drafts.append(row)
        self._num_drafts[found.slot] += 1
        if len(found.drafts) > self._max_drafts:
            raise InvariantError(f"{len(found.drafts)} drafts don't fit state {found.slot}")

    def _upload_rows(self, requests: Sequence[_RequestRows], repeated: list[int]) -> StateRows:
        """Copy all numbers to the device at once."""
        certain = [(each.slot, each.certain) for each in requests if each.certain]
        drafts = [(each.slot, each.drafts) for each in requests if each.drafts]
        numbers = _Numbers()
        settled, open_rows = numbers.add_rounds(certain), numbers.add_rounds(drafts)
        places = numbers.add(repeated)
        rows = numbers.add([row for each in requests for row in each.drafts])
        stored = numbers.add(
            [each.first_place + place for each in requests for place in range(len(each.drafts))]
        )
        on_device = upload_integers(numbers.values, self._device)

        def find_rounds(
            ranges: Sequence[slice], slots: Sequence[tuple[int, list[int]]]
        ) -> RowRounds:
            sole = slots[0][0] if len(slots) == 1 else None
            given, *rounds = (on_device[each] for each in ranges)
            return RowRounds(given, tuple(rounds), sole)

        return StateRows(
            find_rounds(settled, certain),
            tuple(each.chunk for each in requests if each.chunk is not None),
            find_rounds(open_rows, drafts),
            on_device[places],
            on_device[rows],
            on_device[stored],
        )

    def _first_place(self, slot: int) -> int:
        """Return the place of a slot's first draft in :attr:`draft_inputs`."""
        return slot * self._max_drafts

    def _clear_slot(self, slot: int) -> None:
        """Zero the state of a slot in all layers, for a request that starts."""
        self.conv_rows[:, slot] = 0
        self.memories[:, slot] = 0
        self._positions[slot] = self._num_drafts[slot] = 0

    def _check_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.slots:
                raise InvariantError(f"state {slot} is not in a pool of {self.slots}")


@dataclass(slots=True)
class _Numbers:
    """Lists of numbers, one after another."""

    values: list[int] = field(default_factory=list)

    def add(self, numbers: Sequence[int]) -> slice:
        """Add a list; return where it is."""
        self.values += numbers
        return slice(len(self.values) - len(numbers), len(self.values))

    def add_rounds(self, requests: Sequence[tuple[int, list[int]]]) -> list[slice]:
        """Add requests' slots, those with most rows first, and the rows of each round."""
        ordered = sorted(requests, key=lambda request: -len(request[1]))
        found = [self.add([slot for slot, _ in ordered])]
        for index in range(len(ordered[0][1]) if ordered else 0):
            found.append(self.add([rows[index] for _, rows in ordered if index < len(rows)]))
        return found
