"""Base classes of messages: frozen, tagged ``msgspec`` structs.

Subclass :class:`Message` (maps, for control traffic, where keys may be added) or
:class:`LeanMessage` (arrays, for the data plane, where bytes count). ``msgspec`` checks types and
bounds while decoding, so handlers never see a field of the wrong type.
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
    """A data-plane message: a tagged array, ``frozen=True``. Fields may only be appended."""


class Coding(IntEnum):
    """How rows are packed in a frame (``molink.link.packing.compression``)."""

    PLAIN = 0
    LOSSLESS = 1
    #: One scale per row and one byte per element; loses precision.
    INT8 = 2


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """Describes the payload frame: row-major elements of ``dtype`` in ``shape``.

    Packed rows of a volume take ``coded`` bytes, which are fewer than ``nbytes``.
    """

    dtype: DType
    shape: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=2)]
    #: An integer, since a name would take two more bytes per header.
    coding: Coding = Coding.PLAIN
    coded: Index = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the unpacked elements."""
        elements = 1
        for extent in self.shape:
            elements *= extent
        return elements * DTYPE_SIZES[self.dtype]

    @property
    def wire_bytes(self) -> int:
        """Bytes of the payload frame."""
        return self.nbytes if self.coding is Coding.PLAIN else self.coded
