"""Bounds how far the words of one branch raise a peer's term.

A term has 21 bits of rounds, and only rises. One branch may cause :data:`FREE_ROUNDS` and one more
a minute; all rounds last four years of that. Unused minutes count, so that a PC that was away can
return.
"""

from molink.swarm.election.terms import MAX_ROUND, round_of

#: Rounds that a branch may cause at once.
FREE_ROUNDS = 64
#: Seconds per further round.
ROUND_INTERVAL = 60.0
#: Part of its budget by which a branch may raise the term of a leader. The leader's followers count
#: that as the leader's words, and these must remain within its own budget.
LEADER_SHARE = 0.5


class TermBudget:
    """Rounds that each branch has caused. Times in seconds."""

    def __init__(self, now: float, rest: float) -> None:
        """``rest``: for how long this PC had not heard of its swarm before."""
        self._since = now - max(0.0, rest)
        self._spent: dict[str, int] = {}
        #: The highest refused term of each branch.
        self._refused: dict[str, int] = {}

    def allows_term(
        self, branch: str, term: int, own_term: int, now: float, share: float = 1.0
    ) -> bool:
        """Whether a branch may raise the term from ``own_term`` to ``term``.

        ``share``: the part of its budget that it may use.
        """
        rounds = round_of(term) - round_of(own_term)
        allowed = share * (FREE_ROUNDS + (now - self._since) / ROUND_INTERVAL)
        affordable = self._spent.get(branch, 0) + rounds <= allowed
        return rounds <= 0 or (affordable and round_of(term) < MAX_ROUND)

    def spend_rounds(self, branch: str, term: int, own_term: int) -> None:
        """The term rises from ``own_term`` to ``term`` because of a branch."""
        rounds = max(0, round_of(term) - round_of(own_term))
        self._spent[branch] = self._spent.get(branch, 0) + rounds

    def refuse_term(self, branch: str, term: int) -> bool:
        """Refuse a term; returns whether naming it is misbehaviour.

        A peer that was apart names one term until it may return. One that burns terms has raised
        ours before, or names higher and higher ones.
        """
        rises = term > self._refused.get(branch, -1)
        if rises:
            self._refused[branch] = term
        return rises or self._spent.get(branch, 0) >= FREE_ROUNDS // 2
