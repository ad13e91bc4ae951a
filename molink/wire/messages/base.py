"""The base of every message: a frozen, tagged ``msgspec`` struct.

A message is declared by subclassing :class:`Message` (maps, for control traffic, where keys may be
added later) or :class:`LeanMessage` (arrays, for the data plane, where bytes count). ``msgspec``
checks types and bounds while it decodes, so a handler never sees a field of the wrong type.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.facts.scalars import Index

#: A CURVE key in Z85.
PublicKey = Annotated[str, msgspec.Meta(max_length=40, pattern=r"^[!-~]{40}$")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Message(msgspec.Struct, frozen=True):
    """A control message: a tagged map. Declare subclasses ``frozen=True, kw_only=True``."""


class LeanMessage(msgspec.Struct, frozen=True, array_like=True):
    """A data-plane message: a tagged array, ``frozen=True``; fields may be appended only."""


class Coding(IntEnum):
    """How rows are packed in their frame (``molink.link.packing.compression``)."""

    PLAIN = 0
    LOSSLESS = 1
    #: Per row a scale and one byte per element; loses precision.
    INT8 = 2


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """What the one payload frame holds: row-major elements of ``dtype`` in ``shape``.

    Rows of a volume may be packed: the frame then has ``coded`` bytes, fewer than ``nbytes``.
    """

    dtype: DType
    shape: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=2)]
    #: A number, not a name: two bytes more in each header.
    coding: Coding = Coding.PLAIN
    coded: Index = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes of the elements, unpacked."""
        elements = 1
        for extent in self.shape:
            elements *= extent
        return elements * DTYPE_SIZES[self.dtype]

    @property
    def wire_bytes(self) -> int:
        """Size in bytes of the frame that this header promises."""
        return self.nbytes if self.coding is Coding.PLAIN else self.coded
