"""Terms and epochs: a term belongs to one leader, an epoch is created in a term.

``term = round << 16 | the leader's own bits``, and ``epoch >= term << 16``: epochs of a later round
are larger than all earlier ones, on every peer. The first leader's term is 0, so its epochs are 1,
2, 3 …; 21 bits are left for rounds in a number that JSON can carry.
"""

import zlib

_ROUND_SHIFT = 16
_LEADER_MASK = (1 << _ROUND_SHIFT) - 1
#: Last round; no message can carry epochs of a later one.
MAX_ROUND = (1 << 21) - 1


def next_term(above: int, leader: str) -> int:
    """Return the term of ``leader`` in the round after that of ``above``."""
    return (round_of(above) + 1) << _ROUND_SHIFT | zlib.crc32(leader.encode()) & _LEADER_MASK


def first_term(asked: int, held: int, leader: str) -> int:
    """Return the term in which ``leader`` begins: the ``asked`` term, unless a later one exists.

    Its stored state may belong to a later term ``held``. If that is its own term, an earlier run of
    its coordinator created it. Otherwise another leader's state arrived just before, and the new
    term must be above it.
    """
    if held <= asked:
        return asked
    own = not leader or held & _LEADER_MASK == zlib.crc32(leader.encode()) & _LEADER_MASK
    return held if own else next_term(held, leader)


def round_of(term: int) -> int:
    """Return the number of leader changes before a term."""
    return term >> _ROUND_SHIFT


def term_of(epoch: int) -> int:
    """Return the term in which an epoch was created."""
    return epoch >> _ROUND_SHIFT


def epoch_text(epoch: int) -> str:
    """Format an epoch for the user: ``3``, or ``2.3`` for the third after the second change of
    leader.
    """
    changes, number = round_of(term_of(epoch)), epoch & _LEADER_MASK
    return f"{changes}.{number + 1}" if changes else str(epoch)


def next_epoch(last: int, term: int) -> int:
    """Return the epoch after ``last`` in ``term``."""
    return max(last + 1, term << _ROUND_SHIFT)
