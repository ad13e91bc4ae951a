"""Bounds how far one branch's claims raise a peer's term.

A term has 21 bits of rounds, and only rises. One branch may cause :data:`FREE_ROUNDS`, and one more
per minute, at which rate the rounds last four years. Unused minutes accumulate, so that a PC that
was away can return.
"""

from molink.swarm.election.terms import MAX_ROUND, round_of

#: Rounds that a branch may cause immediately.
FREE_ROUNDS = 64
#: Seconds per further round.
ROUND_INTERVAL = 60.0
#: Share of its budget by which a branch may raise a leader's term. The leader's followers charge
#: the rise to the leader, whose own budget must suffice.
LEADER_SHARE = 0.5


class TermBudget:
    """Rounds that each branch has caused. Times are seconds."""

    def __init__(self, now: float, rest: float) -> None:
        """``rest`` is the time for which this PC had not heard of its swarm before."""
        self._since = now - max(0.0, rest)
        self._spent: dict[str, int] = {}
        #: The highest refused term of each branch.
        self._refused: dict[str, int] = {}

    def allows_term(
        self, branch: str, term: int, own_term: int, now: float, share: float = 1.0
    ) -> bool:
        """Whether a branch may raise the term from ``own_term`` to ``term``.

        ``share`` is the share of its budget that it may use.
        """
        rounds = round_of(term) - round_of(own_term)
        allowed = share * (FREE_ROUNDS + (now - self._since) / ROUND_INTERVAL)
        affordable = self._spent.get(branch, 0) + rounds <= allowed
        return rounds <= 0 or (affordable and round_of(term) < MAX_ROUND)

    def spend_rounds(self, branch: str, term: int, own_term: int) -> None:
        """Record that the term rises from ``own_term`` to ``term`` because of a branch."""
        rounds = max(0, round_of(term) - round_of(own_term))
        self._spent[branch] = self._spent.get(branch, 0) + rounds

    def refuse_term(self, branch: str, term: int) -> bool:
        """Refuse a term; return whether naming it is misbehaviour.

        A peer that was partitioned names the same term until it may return. A peer that wastes
        terms has raised this peer's term before, or names ever higher terms.
        """
        rises = term > self._refused.get(branch, -1)
        if rises:
            self._refused[branch] = term
        return rises or self._spent.get(branch, 0) >= FREE_ROUNDS // 2
