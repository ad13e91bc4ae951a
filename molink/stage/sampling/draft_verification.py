"""Accepts the drafts that sampling itself would have chosen.

Each row of a slice with drafts is sampled independently, with its own position and random number,
assuming that all earlier drafts are right. Tokens are valid up to and including the first that
differs from its draft. Outputs therefore equal those without drafts, and need no probability
correction (as in Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
§2.3).
"""

from collections.abc import Sequence

from molink.stage.sampling.logits_processors import SampleRow
from molink.stage.sampling.sampler import SampledToken
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import SamplingParams


def sample_rows(
    first: int,
    drafts: Sequence[int],
    sampling_params: SamplingParams,
    history: TokenHistory,
    allowed: Sequence[bytes] | None = None,
) -> list[SampleRow]:
    """Return a slice's sampling inputs: of the row before its ``drafts``, and of each draft's row.

    ``first`` is the position of the first sampled token. ``allowed`` has each row's allowed tokens,
    if restricted.
    """
    found = [SampleRow(sampling_params, first, history, allowed[0] if allowed else None)]
    for index, draft in enumerate(drafts):
        if sampling_params.needs_history:
            history = history.with_token(draft)
        mask = allowed[index + 1] if allowed else None
        found.append(SampleRow(sampling_params, first + index + 1, history, mask))
    return found


def find_certain_tokens(masks: Sequence[bytes], vocabulary: int) -> list[int]:
    """Return each mask's only token; -1 for several, none, or one beyond the vocabulary."""
    wholes = (int.from_bytes(mask, "little") for mask in masks)
    found = [whole.bit_length() - 1 if whole.bit_count() == 1 else -1 for whole in wholes]
    return [token if token < vocabulary else -1 for token in found]


def accept_tokens(
    drawn: Sequence[SampledToken | None], drafts: Sequence[int]
) -> list[SampledToken]:
    """Return tokens up to and including the first that contradicts its draft.

    Empty if the first row is unusable; later unusable rows are retried.
    """
    found = []
    for token, draft in zip(drawn, (*drafts, -1), strict=True):
        if token is None:
            break
        found.append(token)
        if token.token != draft:
            break
    return found
