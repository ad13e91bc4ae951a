"""Numbers that say who led when: a term is one leader's, an epoch is made in a term.

``term = round << 16 | the leader's own bits``, and ``epoch >= term << 16``: epochs of a later round
are larger than all before, wherever they were made. The founder's first term is 0, so its epochs
are 1, 2, 3 …; 21 bits are left for rounds in a number that JSON can carry.
"""

import zlib

_ROUND_SHIFT = 16
_LEADER_MASK = (1 << _ROUND_SHIFT) - 1
#: Rounds end here: a message can't carry an epoch of a later one.
MAX_ROUND = (1 << 21) - 1


def next_term(above: int, leader: str) -> int:
    """The term of ``leader`` in the round after that of ``above``."""
    return (round_of(above) + 1) << _ROUND_SHIFT | zlib.crc32(leader.encode()) & _LEADER_MASK


def first_term(asked: int, held: int, leader: str) -> int:
    """The term in which ``leader`` begins: the one it is ``asked`` to lead in, if none is later.

    The state that it ``held`` by then may be of a later term. That is its own, of an earlier run of
    its coordinator; or another leader's, whose copy came just before: then it leads after that one.
    """
    if held <= asked:
        return asked
    own = not leader or held & _LEADER_MASK == zlib.crc32(leader.encode()) & _LEADER_MASK
    return held if own else next_term(held, leader)


def round_of(term: int) -> int:
    """How many changes of the leader a term is away from the swarm's beginning."""
    return term >> _ROUND_SHIFT


def term_of(epoch: int) -> int:
    """The term in which an epoch was made."""
    return epoch >> _ROUND_SHIFT


def epoch_text(epoch: int) -> str:
    """An epoch for a person: ``3``; ``2.3`` for the third after the second change of leader."""
    changes, number = round_of(term_of(epoch)), epoch & _LEADER_MASK
    return f"{changes}.{number + 1}" if changes else str(epoch)


def next_epoch(last: int, term: int) -> int:
    """The epoch after ``last``, in ``term``."""
    return max(last + 1, term << _ROUND_SHIFT)
