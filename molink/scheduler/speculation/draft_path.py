"""The tokens that rows in flight assume of a request, and what becomes of them.

While a pass is on its way, further ones may go on with its drafts: *ahead* of tokens that nobody
has sampled yet. All drafts of a request in flight are one path. Once another token comes back, the
rows on the rest of the path are wrong. They go round nevertheless: the next rows are written over
theirs, and the last stage says nothing of them.
"""

from collections.abc import Sequence

from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import SampledId


def are_expected(choices: Sequence[SampledId], position: int, drafts: Sequence[int]) -> bool:
    """Whether these are tokens from ``position`` on, of which all but the last are ``drafts``.

    The KV of tokens that were neither sampled before nor drafts would be that of others.
    """
    if not 1 <= len(choices) <= 1 + len(drafts):
        return False
    tokens = [choice.token for choice in choices]
    positions = [choice.position for choice in choices]
    right = all(token == draft for token, draft in zip(tokens[:-1], drafts, strict=False))
    return right and positions == list(range(position, position + len(choices)))


def compare_drafts(state: RequestState, choices: Sequence[SampledId]) -> tuple[int, int]:
    """How many drafts of its path ``choices`` tell of, and how many of them, from the first, are
    right."""
    pairs = list(zip(choices, state.draft_path, strict=False))
    wrong = (at for at, (choice, draft) in enumerate(pairs) if choice.token != draft)
    return len(pairs), next(wrong, len(pairs))


def advance_path(state: RequestState, new: int, right: int) -> None:
    """Of the last ``new`` tokens of ``job`` the first ``right`` were on its path: follow it, or
    leave it."""
    del state.draft_path[:new]
    if (
        right < new
        or not state.awaited_seqs
        or state.in_flight[state.awaited_seqs[0]] != len(state.tokens) - 1
    ):
        state.clear_draft_path()
    else:
        state.num_issued = len(state.tokens)
