"""What comes into the prefix cache and leaves it, as those who route are told."""

from collections import Counter, deque
from itertools import islice

from molink.routing.cache_report import MAX_DIGESTS
from molink.routing.spans import DIGEST_BYTES, ROOT_DIGEST, SPAN_TOKENS, span_digests
from molink.scheduler.prefix_tree import OTHER_ROOT, ROOT, BlockTokens

#: Changes that are remembered: who asks less often gets what came last.
MAX_CHANGES = MAX_DIGESTS


class SpanLog:
    """Spans of the cached blocks, and the latest changes of them.

    A span is cached with the block that it ends in. Sequences whose KV is another although their
    tokens may be the same are left out.
    """

    def __init__(self) -> None:
        #: Of each full block: the digest of its last whole span, the tokens after that, and the
        #: spans that end in it.
        self._blocks: dict[int, tuple[bytes, BlockTokens, tuple[int, ...]]] = {
            ROOT: (ROOT_DIGEST, (), ())
        }
        #: How many blocks each span ends in: with long blocks, several that differ behind it.
        self._span_counts: Counter[int] = Counter()
        self._changed_spans: deque[int] = deque(maxlen=MAX_CHANGES)
        #: Changes so far.
        self.version = 0

    def add_block(self, block: int, parent: int, key: BlockTokens) -> None:
        """A full block is cached, below another one or the root."""
        if parent == OTHER_ROOT or parent not in self._blocks:
            return
        digest, before, _ = self._blocks[parent]
        rest = before + key
        spans = span_digests(rest, digest)
        if spans:
            digest = spans[-1].to_bytes(DIGEST_BYTES, "little")
            rest = rest[len(spans) * SPAN_TOKENS :]
        self._blocks[block] = digest, rest, spans
        for span in spans:
            self._span_counts[span] += 1
            if self._span_counts[span] == 1:
                self._record_change(span)

    def remove_block(self, block: int) -> None:
        """A block is cached no longer; one that wasn't full never was here."""
        _, _, spans = self._blocks.pop(block, (ROOT_DIGEST, (), ()))
        for span in spans:
            self._span_counts[span] -= 1
            if not self._span_counts[span]:
                del self._span_counts[span]
                self._record_change(span)

    def changes_since(self, version: int) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """What came and what left since then.

        Where that isn't known, what came last; ``True`` if that is all that there is.
        """
        missed = self.version - version
        if not 0 <= missed <= len(self._changed_spans) or version < 0:
            newest = tuple(islice(reversed(self._span_counts), MAX_DIGESTS))
            return len(self._span_counts) <= MAX_DIGESTS, newest[::-1], ()
        changed = dict.fromkeys(list(self._changed_spans)[len(self._changed_spans) - missed :])
        added = tuple(span for span in changed if span in self._span_counts)
        return False, added, tuple(span for span in changed if span not in self._span_counts)

    def _record_change(self, span: int) -> None:
        self._changed_spans.append(span)
        self.version += 1
