"""Digests of a prompt's beginnings: what those who route and those who cache compare."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

#: Tokens of a span: prompts are compared by as many whole spans as they have. It is no multiple of
#: a pipeline's block size: these differ, and a prompt has to have the same digests everywhere.
SPAN_TOKENS = 64
#: Bytes of a digest, and what the first span of every prompt follows.
DIGEST_BYTES = 8
ROOT_DIGEST = bytes(DIGEST_BYTES)


def span_digests(tokens: Sequence[int], after: bytes = ROOT_DIGEST) -> tuple[int, ...]:
    """A digest for each whole span of ``tokens``: of that span and of all before it.

    ``after`` is the digest of what comes before ``tokens`` (little-endian).
    """
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    data, size = ids.tobytes(), SPAN_TOKENS * ids.itemsize
    found, digest = [], after
    for end in range(size, len(data) + 1, size):
        digest = blake2b(data[end - size : end], digest_size=DIGEST_BYTES, salt=digest).digest()
        found.append(int.from_bytes(digest, "little"))
    return tuple(found)
