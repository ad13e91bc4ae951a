"""All errors that molink raises on purpose.

::

    MolinkError                  message says what happened, where, and what to do next
    ├── UsageError               a command or a setting that can't work (exit code 2)
    │   ├── TokenError           a join token that is malformed, expired or of another swarm
    │   └── PortInUse            no free port; names the option
    ├── ModelError               a model folder that can't be served
    │   ├── ModelNotFound        no such model (HTTP 404)
    │   ├── GatedModel           the hub requires access rights (exit code 12)
    │   ├── UnsupportedModel     architecture or feature that is not implemented
    │   ├── BrokenModel          a file is missing, truncated or inconsistent; names it
    │   └── AlteredModel         bytes that don't match the hash of the model's owner
    ├── RequestError             a request that can't be served; names the field (exit code 14)
    │   └── ContextTooLong       prompt or prompt + max_tokens beyond the context (HTTP 400)
    ├── Overloaded               queues are full; carries ``retry_after`` (HTTP 429)
    ├── DeadlineExceeded         no output before the request's deadline (HTTP 504)
    ├── Unavailable              no pipeline can serve now (HTTP 503)
    │   ├── ConnectionBroken     the connection ended before the reply
    │   ├── FilesMissing         no connected PC has some of a model's files
    │   └── PairingUnanswered    nobody approved this PC in time (exit code 11)
    ├── WireError                bytes that are not a valid message
    │   └── MessageTooLarge      a header or payload over its bound
    ├── NotAuthorized            a peer may not do this (exit code 7)
    │   ├── PeerBanned           this PC was revoked (exit code 9)
    │   └── PairingRefused       the swarm or this PC's user declined (exit code 10)
    ├── VersionMismatch          this PC's and the swarm's versions differ (exit code 13)
    ├── StateError               a state folder that can't be used; names the file
    │   └── DamagedState         its file is damaged
    ├── WorkerError              a stage process that failed to start or died
    │   └── KernelsFailed        kernels that its memory plan relies on don't work; names them
    └── InvariantError           inconsistent internal state; carries the transition log
"""

from collections.abc import Iterable


class MolinkError(Exception):
    """Base class; ``str()`` is fit for users."""

    #: Process exit code of a command that ends with this error.
    exit_code = 1


class UsageError(MolinkError):
    """A command line or a setting that can't work."""

    exit_code = 2


class TokenError(UsageError):
    """A join token that is malformed, expired or of another swarm."""

    exit_code = 3


class PortInUse(UsageError):
    """No free port where one was asked for."""

    exit_code = 4


class ModelError(MolinkError):
    """A model that can't be served."""

    exit_code = 5


class ModelNotFound(ModelError):
    """No model has that name."""


class GatedModel(ModelError):
    """The hub restricts access to the model."""

    exit_code = 12


class UnsupportedModel(ModelError):
    """The architecture or one of its features is not implemented."""


class BrokenModel(ModelError):
    """A file of the model folder is missing, truncated or inconsistent."""


class AlteredModel(ModelError):
    """Bytes of a model don't match the hash of its owner."""


class RequestError(MolinkError):
    """A client's request that can't be served.

    ``param`` names the offending field of the request, as OpenAI's error envelope does.
    """

    exit_code = 14

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(RequestError):
    """The prompt, or prompt plus ``max_tokens``, exceeds the context."""


class Overloaded(MolinkError):
    """Queues are full; try again after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(MolinkError):
    """The request's deadline passed before any output."""


class Unavailable(MolinkError):
    """No pipeline can serve this now."""

    exit_code = 6


class ConnectionBroken(Unavailable):
    """The connection ended before the reply; the request may have been received."""


class FilesMissing(Unavailable):
    """No connected PC has some files of a model; names the layers."""


class PairingUnanswered(Unavailable):
    """This PC asked to join a swarm, and nobody approved it in time."""

    exit_code = 11


class WireError(MolinkError):
    """Bytes from the network that are not a valid message."""


class MessageTooLarge(WireError):
    """A header or a payload over its bound."""


class NotAuthorized(MolinkError):
    """A peer asked for something that it may not do."""

    exit_code = 7

    @classmethod
    def owner_only(cls, action: str) -> "NotAuthorized":
        """Return the error for a peer that is not an owner of its swarm."""
        return cls(
            "only an owner of the swarm (its first PC, or one that `molink add-owner` named) may "
            + action
        )


class PeerBanned(NotAuthorized):
    """This PC was a member of the swarm and was revoked."""

    exit_code = 9


class PairingRefused(NotAuthorized):
    """This PC asked to join a swarm and was declined."""

    exit_code = 10


class VersionMismatch(MolinkError):
    """The molink versions of this PC and of the swarm are incompatible; names both."""

    exit_code = 13


class StateError(MolinkError):
    """Saved state that can't be used: damaged, of a newer molink, or in use by another process."""

    exit_code = 8


class DamagedState(StateError):
    """The file of the saved state is damaged."""


class WorkerError(MolinkError):
    """A stage process failed to start, or died."""


class KernelsFailed(WorkerError):
    """``kernels`` don't work for a stage, so the stage needs more memory than planned."""

    def __init__(self, kernels: Iterable[str]) -> None:
        self.kernels = tuple(kernels)
        names = " and ".join(self.kernels)
        super().__init__(
            f"the memory plan relies on {names}, which this device doesn't run with this model; "
            "layers are placed again without that"
        )


class InvariantError(MolinkError):
    """Inconsistent internal state. ``story`` is the log of the last transitions, oldest first."""

    def __init__(self, message: str, story: Iterable[str] = ()) -> None:
        self.story = tuple(story)
        super().__init__("\n  ".join([message, *self.story]))
