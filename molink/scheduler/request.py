"""What a daemon asks of a head, and what the head answers."""

from dataclasses import dataclass

from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken, Rejected


@dataclass(frozen=True, slots=True)
class SchedulerRequest:
    """A request as a daemon submits it.

    ``peer`` is the daemon and ``key`` its own id of the request. ``tokens`` are the prompt and, if
    the request is resubmitted, what was generated in an earlier epoch; the first ``prompt_tokens``
    of them are the prompt. ``max_tokens`` counts tokens still to be generated. ``credit_window`` is
    how many emitted tokens may be uncredited before decoding pauses. ``grammar`` is the text of
    what the answer is held to, if it is; only the tail reads it. ``client`` is the daemon's name
    for whose request it is; requests of one client with less ``priority`` go first. It is to be
    admitted within ``max_queue_s`` seconds, or not at all; 0: as the head has it. Its answer is to
    end within ``deadline_s`` seconds, when its daemon cancels it; 0: it may take any time.
    """

    peer: str
    key: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    credit_window: int = 256
    grammar: bytes = b""
    client: str = ""
    priority: int = 0
    max_queue_s: float = 0.0
    deadline_s: float = 0.0

    @property
    def client_key(self) -> tuple[str, str]:
        """Owner and client: a client is its daemon's word, so it counts within that only."""
        return self.peer, self.client


@dataclass(frozen=True, slots=True)
class Emission:
    """A message for the daemon ``peer``."""

    peer: str
    message: OutputToken | Rejected
