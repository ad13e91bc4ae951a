"""For how many tokens' keys and values a ring is to have room: memory weighed against hops."""

from molink.facts.footprint import MIN_TOKENS
from molink.facts.model import ModelFacts, Objective

#: Tokens of a long conversation: a ring has room for one, whatever that costs, if any ring has.
CONVERSATION_TOKENS = 8192
#: Beyond that, four times the room may make a ring cost this part more …
ROOM_WORTH = 0.25
_ROOM_FACTOR = 4
#: … up to the room for so many streams of MIN_TOKENS tokens.
_STREAMS: dict[Objective, int] = {"latency": 4, "throughput": 64}


def kv_room_steps(facts: ModelFacts, objective: Objective) -> list[int]:
    """Tokens that a ring may have room for, ascending: from what it must have to what is wanted."""
    found = [min(facts.max_model_len, MIN_TOKENS)]
    most = _STREAMS[objective] * found[0]
    while found[-1] < most:
        found.append(min(found[-1] * _ROOM_FACTOR, most))
    return found


def is_room_worth(tokens: int, cost: float, before: float) -> bool:
    """Whether room for ``tokens`` is worth ``cost``, where ``before`` is that of a quarter."""
    return tokens <= CONVERSATION_TOKENS or cost <= before * (1 + ROOM_WORTH)
