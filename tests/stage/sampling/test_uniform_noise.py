"""The noise is a fixed function, so that streams can move between devices and versions."""

from statistics import fmean, pvariance

from molink.stage.sampling.token_draws import uniform_noise

#: Never change these: a resumed stream must get the same noise from a newer version.
KNOWN = {(0, 0): 0.741511, (1, 0): 0.843647, (0, 1): 0.350932, (2**53, 2**53): 0.924801}


def test_known_values() -> None:
    assert [round(uniform_noise(seed, position), 6) for seed, position in KNOWN] == list(
        KNOWN.values()
    )


def test_it_is_uniform_over_seeds_and_positions() -> None:
    for draws in (
        [uniform_noise(seed, 0) for seed in range(4000)],
        [uniform_noise(0, position) for position in range(4000)],
    ):
        assert all(0.0 <= number < 1.0 for number in draws)
        assert abs(fmean(draws) - 1 / 2) < 0.02
        assert abs(pvariance(draws) - 1 / 12) < 0.005
