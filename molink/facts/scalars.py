"""Bounded scalar types of facts and messages."""

from typing import Annotated

import msgspec

#: Counters and positions, which only rise.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Ids of blocks, tokens, requests of a pipeline.
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
#: A name, an id, an address.
Text = Annotated[str, msgspec.Meta(max_length=256)]
#: A sentence for a person.
Sentence = Annotated[str, msgspec.Meta(max_length=1024)]
#: Host names or addresses of a PC, with or without a port.
Addresses = Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)]
