"""Formats quantities in few characters."""

from collections.abc import Iterable

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")


def format_size(nbytes: float) -> str:
    """Format bytes: ``0 B``, ``1.2 kB``, ``64 MB``; at most 7 characters up to petabytes."""
    return _scale_number(nbytes, _SIZES)


def format_usage(used: Iterable[int], total: int) -> str:
    """Format what parts of ``total`` bytes are used for, in its unit: ``3.0+1.0/12.0 GB``."""
    text = format_size(total)
    scale = 1000 ** _SIZES.index(text.split()[1])
    parts = (f"{one / scale:.1f}" if one < 99.95 * scale else f"{one / scale:.0f}" for one in used)
    return f"{'+'.join(parts)}/{text}"


def format_bandwidth(nbytes: float) -> str:
    """Format bytes/s as a bit rate: ``94 Mbit/s``; ``?`` if unknown (0)."""
    return (
        _scale_number(8 * nbytes, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))
        if nbytes
        else "?"
    )


def _scale_number(number: float, units: tuple[str, ...]) -> str:
    number, unit = max(0.0, number), 0
    while number >= 999.5 and unit < len(units) - 1:
        number, unit = number / 1000, unit + 1
    digits = 1 if unit and number < 99.95 else 0
    return f"{min(number, 9999):.{digits}f} {units[unit]}"


def format_seconds(duration: float) -> str:
    """Format a short time: ``0.3 ms``, ``15 ms``, ``2.1 s``; ``?`` if unknown (0)."""
    if duration <= 0:
        return "?"
    if duration < 0.9995:
        return f"{duration * 1e3:.1f} ms" if duration < 0.0995 else f"{duration * 1e3:.0f} ms"
    return f"{min(duration, 9999):.1f} s"


def format_duration(duration: float) -> str:
    """Format a duration: ``12 s``, ``3 min``, ``2 h``, ``5 d``."""
    for limit, unit, name in ((100, 1, "s"), (100 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if duration < limit:
            return f"{max(0, duration) / unit:.0f} {name}"
    return f"{min(duration / 86400, 9999):.0f} d"
