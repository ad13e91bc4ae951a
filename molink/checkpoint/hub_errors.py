"""What the Hugging Face hub's library raises, as errors of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from molink.errors import GatedModel, ModelError, ModelNotFound, MolinkError, Unavailable


def network_errors() -> Any:
    """What is raised where the line is the reason."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The library's HTTP client isn't ours to name: all its errors have the same base.
    http: Any = HfHubHTTPError.__mro__[1]
    return (http, OfflineModeIsEnabled)


def is_refusal(error: Exception) -> bool:
    """Whether the hub itself says no, so that to ask again is no use."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return 400 <= status < 500 and status not in (408, 429)


def raise_if_stopped(repository: str, stop: Event) -> None:
    """Raise ``Unavailable`` if ``stop`` was set."""
    if stop.is_set():
        raise Unavailable(f"fetching {repository} was ended; what has come is kept")


@contextmanager
def translate_hub_errors(repository: str) -> Iterator[None]:
    """What the hub's library raises, as errors of ours."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except MolinkError:
        raise
    except GatedRepoError as error:
        raise GatedModel(
            f"{repository} is gated: its authors want to be asked first. Accept their terms at "
            f"{hub}/{repository}, then give your token (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"no model {repository!r} at {hub}: is the name right (OWNER/NAME)? A private one "
            "needs your token (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, *network_errors()) as error:
        if is_refusal(error):
            raise GatedModel(f"{hub} refuses {repository}: {first_line(error)}") from error
        raise Unavailable(
            f"the hub at {hub} can't give {repository} now: {first_line(error)}. What has come is "
            "kept. Try again later, or take a model folder from elsewhere (`--model FOLDER`)"
        ) from error
    except OSError as error:
        raise ModelError(f"can't write {repository} to the cache: {error}") from error


def first_line(error: Exception) -> str:
    """The first line of what it says."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
