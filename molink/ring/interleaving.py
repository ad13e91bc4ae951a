"""Decides when decode rows run between the layers of a chunk instead of in its pass.

In one fused pass, decode rows and a chunk read the weights once, but the decode rows wait for the
whole chunk. Interleaved, they wait for only one layer of it, and their own pass prolongs the chunk.
So chunks are interleaved if prompts queue, which makes chunks large
(:mod:`molink.scheduler.chunk_size`). Each is interleaved at most once, with decode rows that
prolong it by at most :data:`MAX_PROLONGED`. Other decode rows share a pass with the next chunk.
"""

from molink.facts.profile import Profile
from molink.ring.scoreboard import StepRule
from molink.ring.step import Step, StepInput
from molink.wire.messages.data_plane import Volume

#: Share of a chunk's own time that decode rows between its layers may take.
MAX_PROLONGED = 0.2


class Interleaving(StepRule):
    """Decides for a stage with a profile; without interleaving, everything is fused."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        #: Whether a chunk runs, and the seconds that decode rows between its layers may take.
        self._runs_chunk = False
        self._allowed_s = 0.0

    @property
    def is_possible(self) -> bool:
        """Whether the stage can run decode rows between the layers of a chunk."""
        return self._profile.interleaves

    def allows(self, decode: StepInput | None, volume: Volume, count: int) -> bool:
        if not self.is_possible:
            return True
        if self._runs_chunk:
            return not volume.prefill and self._decode_s(volume) <= self._allowed_s
        if decode is None or not volume.prefill or not volume.interleaved:
            return True
        chunk_s = self._profile.prefill_s(count, volume.context)
        return self._decode_s(decode.volume) > MAX_PROLONGED * chunk_s

    def begin_step(self, step: Step) -> None:
        """Record a step that begins."""
        if self._runs_chunk and step.decode is not None:
            self._allowed_s = 0.0
        elif step.decode is None and step.prefill is not None:
            volume = step.prefill.volume
            chunk_s = self._profile.prefill_s(volume.count, volume.context)
            self._runs_chunk = True
            self._allowed_s = MAX_PROLONGED * chunk_s if volume.interleaved else 0.0

    def end_step(self, step: Step) -> None:
        """Record a step that has ended."""
        if step.prefill is not None:
            self._runs_chunk = False

    def _decode_s(self, volume: Volume) -> float:
        return self._profile.decode_s(volume.count, volume.context)
