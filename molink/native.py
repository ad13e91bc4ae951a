"""Guards calls of ``tokenizers``, whose errors on invalid files are undocumented."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from molink.errors import MolinkError


@contextmanager
def raise_as(failure: Callable[[str], MolinkError]) -> Iterator[None]:
    """Turn the library's errors within the block into ``failure(reason)``.

    The library raises bare ``Exception``. Its panics (failed Rust assertions) derive from
    ``BaseException`` and can be recognized only by name. Cancellation and exit pass through.
    """
    try:
        yield
    except MolinkError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise failure(str(error)[:500]) from error
