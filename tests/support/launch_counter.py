"""Counts the launches of a GPU, on a PC without one."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from molink.stage.decoder import norm as norms
from molink.stage.linear import PlainLinear


class LaunchCounter(TorchDispatchMode):
    """Counts operators that compute; views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        first = result[0] if isinstance(result, list | tuple) else result
        # A conversion is called a view, but may copy.
        shares = func.is_view and (
            first.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        )
        if not shares and "empty" not in name and name != "_unsafe_view":
            self.counts[name] += 1
        return result

    def count_whole(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        """``operator`` as one launch, which it is on a GPU."""

        def counted(*given: Any, **named: Any) -> Any:
            before = self.counts.copy()
            result = operator(*given, **named)
            self.counts = before
            self.counts[name] += 1
            return result

        return counted


@contextmanager
def counted_launches() -> Iterator[LaunchCounter]:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    counter = LaunchCounter()

    def launch(self: Any, *_: Any, **named: Any) -> None:
        counter.counts[self.fn.__name__] += 1

    with (
        mock.patch.object(InterpretedFunction, "run", launch),
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(norms, "rms_norm", counter.count_whole("rms_norm", norms.rms_norm)),
        mock.patch.object(
            PlainLinear, "__call__", counter.count_whole("product", PlainLinear.__call__)
        ),
        counter,
    ):
        yield counter
