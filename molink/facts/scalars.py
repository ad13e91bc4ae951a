"""Bounded numbers and texts: the fields that facts and messages are made of."""

from typing import Annotated

import msgspec

#: Counters that rise for ever: seqs, sequence numbers, positions.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Ids of blocks, tokens, requests within a pipeline.
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
#: A short piece of text: a name, an id, an address.
Text = Annotated[str, msgspec.Meta(max_length=256)]
#: A sentence for a person.
Sentence = Annotated[str, msgspec.Meta(max_length=1024)]
#: Where a PC can be reached: host names or addresses, with or without a port.
Addresses = Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)]
