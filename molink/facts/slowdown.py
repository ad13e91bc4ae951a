"""How a device computes now, compared with what was measured when its stage was loaded."""

from dataclasses import dataclass

from molink.facts.profile import Profile

#: Whatever is beyond, or below one part in so many, is no measurement.
MAX_SLOWDOWN = 100.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long as the stage's profile says its steps take, by their kind."""

    decode: float = 1.0
    prefill: float = 1.0

    def apply_to(self, profile: Profile) -> Profile:
        """The profile as it is at this pace."""
        return profile.scale_by(self.decode, self.prefill)
