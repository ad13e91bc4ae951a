"""Tables of paged sequences, as the flash kernels want them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_tensor


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows of some sequences and where their keys and values are; all int32 on the device.

    ``table [n, pages]`` has their pages, ``used [n]`` how many positions of them count, ``starts
    [n + 1]`` where each one's rows begin. The kernel wants ``ends [n + 1]`` too, which would say
    where keys begin if these weren't paged.
    """

    table: Tensor
    num_positions: Tensor
    starts: Tensor
    ends: Tensor

    @classmethod
    def from_numbers(cls, numbers: Tensor, count: int) -> "PageTable":
        """From what :func:`pack_page_table` has made."""
        width = (len(numbers) - 3 * count - 2) // count
        sizes = [count * width, count, count + 1, count + 1]
        table, used, starts, ends = torch.split(numbers, sizes)
        return cls(table.view(count, width), used, starts, ends)


def pack_page_table(sequences: Sequence[SequenceRows], width: int, page: int) -> "array[int]":
    """The numbers of :class:`PageTable`, one after the other, so that one copy is enough.

    A table is filled up to ``width`` with its first page; what is beyond ``used`` isn't read.
    """
    table, used = array("i"), array("i")
    starts, ends = array("i", [0]), array("i", [0])
    for index, sequence in enumerate(sequences):
        length = sequence.start + sequence.count
        pages = sequence.blocks[: -(-length // page)]
        table.extend(pages)
        table.extend([pages[0]] * (width - len(pages)))
        used.append(length)
        starts.append(starts[-1] + sequence.count)
        ends.append((index + 1) * width * page)
    return table + used + starts + ends


def row_indices(part: Sequence[tuple[int, SequenceRows]], device: torch.device) -> Tensor | slice:
    """Rows of sequences in a batch: a slice where nothing lies between them."""
    first, (last, sequence) = part[0][0], part[-1]
    if last + sequence.count - first == sum(each.count for _, each in part):
        return slice(first, last + sequence.count)
    rows = [row + i for row, each in part for i in range(each.count)]
    return upload_tensor(torch.tensor(rows), device)
