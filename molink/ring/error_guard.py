"""What a stage does on an event either ends well or ends the stage."""

import logging
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)


class ErrorGuard:
    """A context in which an error would leave a seq undone for ever: the stage ends with it.

    It may be entered again and again, several times a step: a generator would cost more than much
    of what is done in it.
    """

    __slots__ = ("_on_broken",)

    def __init__(self, on_broken: Callable[[str], None]) -> None:
        """``on_broken`` is told what the error was."""
        self._on_broken = on_broken

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("this stage can't go on", exc_info=error)
        self._on_broken(f"{type(error).__name__}: {error}")
        return True
