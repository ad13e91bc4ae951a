"""KV room of a ring, weighed against hops."""

from molink.facts.footprint import MIN_TOKENS
from molink.facts.model import ModelFacts, Objective

#: Tokens of a long conversation: a ring has room for one at any cost, if any ring has.
CONVERSATION_TOKENS = 8192
#: Beyond that, four times the room may raise the cost by this fraction …
ROOM_WORTH = 0.25
_ROOM_FACTOR = 4
#: … up to room for this many streams of MIN_TOKENS tokens.
_STREAMS: dict[Objective, int] = {"latency": 4, "throughput": 64}


def kv_room_steps(facts: ModelFacts, objective: Objective) -> list[int]:
    """KV room to try in tokens, ascending: from the required minimum to the wanted maximum."""
    found = [min(facts.max_model_len, MIN_TOKENS)]
    most = _STREAMS[objective] * found[0]
    while found[-1] < most:
        found.append(min(found[-1] * _ROOM_FACTOR, most))
    return found


def is_room_worth(tokens: int, cost: float, before: float) -> bool:
    """Whether KV room for ``tokens`` is worth ``cost``, given the cost ``before`` of a quarter of
    it."""
    return tokens <= CONVERSATION_TOKENS or cost <= before * (1 + ROOM_WORTH)
