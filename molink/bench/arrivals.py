"""When requests arrive."""

import math
import random

from molink.errors import UsageError


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """``count`` arrival times in seconds from the start, the first at 0, rising.

    Gaps are exponential with mean ``1 / rate`` (requests/s); ``inf`` puts all at 0. The same seed
    gives the same times.

    Raises:
        UsageError: ``rate`` is not positive, or ``count`` is below 1.
    """
    if math.isnan(rate) or rate <= 0:
        raise UsageError(f"--rate has to be a positive number of requests/s or inf, not {rate:g}")
    if count < 1:
        raise UsageError(f"--requests has to be at least 1, not {count}")
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + source.expovariate(rate))
    return times
