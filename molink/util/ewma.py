"""Exponentially weighted moving averages."""


class Ewma:
    """A running mean that gives each new sample the same weight.

    Without an initial ``value`` the first sample becomes the mean.
    """

    __slots__ = ("value", "weight")

    def __init__(self, weight: float, value: float | None = None) -> None:
        """``weight`` of a new sample, in (0, 1]."""
        self.weight = weight
        self.value = value

    def get_or(self, default: float) -> float:
        """Return the mean, or ``default`` before the first sample."""
        return default if self.value is None else self.value

    def add_sample(self, sample: float, weight: float | None = None) -> float:
        """Move the mean towards ``sample``, with another ``weight`` if given; return the mean."""
        if self.value is None:
            self.value = sample
        else:
            self.value += (self.weight if weight is None else weight) * (sample - self.value)
        return self.value
