"""What is asked and answered, where that matters: real tokens for drafts to be right or wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.bench.trace import TraceRow


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a prompt and of its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def token(self, position: int) -> int:
        """The one at a position of both; what comes after them is 0."""
        at = position - len(self.prompt)
        if at < 0:
            return self.prompt[position]
        return self.answer[at] if at < len(self.answer) else 0


def rows_of(texts: Sequence[Text]) -> tuple[TraceRow, ...]:
    """Requests of these sizes in this order, a second apart, for a workload."""
    return tuple(
        TraceRow(float(index), len(text.prompt), len(text.answer))
        for index, text in enumerate(texts)
    )
