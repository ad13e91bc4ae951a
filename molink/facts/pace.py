"""How a device computes now, compared with what was measured when its stage was loaded."""

from dataclasses import dataclass

from molink.facts.profile import Profile

#: Whatever is beyond, or below one part in so many, is no measurement.
MAX_PACE = 100.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How many times as long as the stage's profile says its steps take, by their kind."""

    decode: float = 1.0
    prefill: float = 1.0

    def of(self, profile: Profile) -> Profile:
        """The profile as it is at this pace."""
        return profile.scaled(self.decode, self.prefill)
