"""Guards around ``tokenizers``: what a stranger's files make it raise is part of no contract."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from molink.errors import MolinkError


@contextmanager
def raise_as(failure: Callable[[str], MolinkError]) -> Iterator[None]:
    """Turn what the library raises within into ``failure``, made from a reason.

    It raises bare ``Exception``, and its panics (Rust's failed assertions) are a ``BaseException``
    that can't be imported, only known by name. Whatever else is none passes: cancellation, exit.
    """
    try:
        yield
    except MolinkError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise failure(str(error)[:500]) from error
