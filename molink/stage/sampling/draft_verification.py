"""Which drafts are accepted: those that would have been sampled anyway.

Each row of a group with drafts is sampled as it would be alone, at its own position and so with its
own random number, after the tokens that it follows if all drafts before it are right. The tokens
are good up to the first that is not the draft. So an answer is the one that there would be without
drafts, to the last token, and needs no correction of probabilities (as Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", §2.3, does for drafts that are drawn).
"""

from collections.abc import Sequence

from molink.stage.sampling.logits_processors import SampleRow
from molink.stage.sampling.sampler import SampledToken
from molink.stage.sampling.token_history import TokenHistory
from molink.wire.messages.data_plane import RequestSlice, SamplingParams


def sample_rows(
    request_slice: RequestSlice,
    sampling_params: SamplingParams,
    history: TokenHistory,
    allowed: Sequence[bytes] | None = None,
) -> list[SampleRow]:
    """How to sample a group: its last row, or the one before the checked drafts and each of theirs.

    ``allowed`` has the tokens that may come after each of these, if not all may.
    """
    drafts = request_slice.verified_drafts
    masks = allowed or (None,) * (1 + len(drafts))
    first = request_slice.start + request_slice.count - len(drafts)
    found = [SampleRow(sampling_params, first, history, masks[0])]
    for index, draft in enumerate(drafts):
        if sampling_params.needs_history:
            history = history.with_token(draft)
        found.append(SampleRow(sampling_params, first + index + 1, history, masks[index + 1]))
    return found


def find_certain_tokens(masks: Sequence[bytes], vocabulary: int) -> list[int]:
    """The only token of each mask; -1 where it has several, none, or one beyond the vocabulary."""
    wholes = (int.from_bytes(mask, "little") for mask in masks)
    found = [whole.bit_length() - 1 if whole.bit_count() == 1 else -1 for whole in wholes]
    return [token if token < vocabulary else -1 for token in found]


def accept_tokens(
    drawn: Sequence[SampledToken | None], drafts: Sequence[int]
) -> list[SampledToken]:
    """Those of ``drawn``, one for each row, that follow right drafts.

    None if the first is unusable; where a later one is, the next pass will find that.
    """
    found = []
    for token, draft in zip(drawn, (*drafts, -1), strict=True):
        if token is None:
            break
        found.append(token)
        if token.token != draft:
            break
    return found
