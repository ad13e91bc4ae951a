"""Terms and epochs: a term belongs to one leader, an epoch is created in a term.

``term = round << 16 | the leader's own bits``, and ``epoch >= term << 16``: epochs of a later round
are larger than all before, wherever they were created. The first leader's term is 0, so its epochs
are 1, 2, 3 …; 21 bits are left for rounds in a number that JSON can carry.
"""

import zlib

_ROUND_SHIFT = 16
_LEADER_MASK = (1 << _ROUND_SHIFT) - 1
#: Last round: no message can carry a later round's epochs.
MAX_ROUND = (1 << 21) - 1


def next_term(above: int, leader: str) -> int:
    """The term of ``leader`` in the round after that of ``above``."""
    return (round_of(above) + 1) << _ROUND_SHIFT | zlib.crc32(leader.encode()) & _LEADER_MASK


def first_term(asked: int, held: int, leader: str) -> int:
    """The term in which ``leader`` begins: the one it is ``asked`` to lead in, if none is later.

    Its stored state may be of a later term ``held``. If that term is its own, an earlier run of its
    coordinator created it. Otherwise another leader's state arrived just before, and it leads after
    it.
    """
    if held <= asked:
        return asked
    own = not leader or held & _LEADER_MASK == zlib.crc32(leader.encode()) & _LEADER_MASK
    return held if own else next_term(held, leader)


def round_of(term: int) -> int:
    """Number of leader changes before a term."""
    return term >> _ROUND_SHIFT


def term_of(epoch: int) -> int:
    """The term in which an epoch was created."""
    return epoch >> _ROUND_SHIFT


def epoch_text(epoch: int) -> str:
    """An epoch for the user: ``3``; ``2.3`` for the third one after the second change of leader."""
    changes, number = round_of(term_of(epoch)), epoch & _LEADER_MASK
    return f"{changes}.{number + 1}" if changes else str(epoch)


def next_epoch(last: int, term: int) -> int:
    """The epoch after ``last`` in ``term``."""
    return max(last + 1, term << _ROUND_SHIFT)
