"""Settings of this PC that its owner may change over the endpoint.

None of them opens a port, names a file or a program, or admits anybody.
"""

import os
from collections.abc import Mapping
from typing import Any

from molink.errors import RequestError, UsageError
from molinkd.api.administration import PcSetting
from molinkd.peer.home import Home
from molinkd.peer.settings import load_settings, read_options, settings_layers, write_options

#: What each setting does, and its choices; any text without choices.
_SAFE_SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pause_times": ("Hold no layers at these times, such as 18:00-23:30", ()),
    "pause_when_busy": ("Hold no layers while other programs use the GPU", ("auto", "on", "off")),
    "keep_awake": ("Prevent sleep while this PC holds layers", ("true", "false")),
    "replicate_models": ("Copy served models to this disk", ("true", "false")),
    "standby_worker": ("Keep a worker ready for recovery", ("true", "false")),
}


def list_safe_settings(home: Home) -> list[PcSetting]:
    """The settings for the next start, with their sources. Blocks.

    Raises:
        UsageError: a file of settings can't be read.
    """
    remembered = read_options(home.options)
    settings = load_settings(home, {}, os.environ, remembered)
    sources = {
        name: where
        for where, layer in settings_layers(home, os.environ, remembered)
        for name in layer
    }
    return [
        PcSetting(
            name, about, _format_value(getattr(settings, name)), choices, sources.get(name, "")
        )
        for name, (about, choices) in _SAFE_SETTINGS.items()
    ]


def change_safe_setting(home: Home, name: str, text: str) -> None:
    """Save a setting as an option of the next start; an empty text forgets it. Blocks.

    Raises:
        RequestError: it is not among these settings, or the value is invalid.
    """
    if name not in _SAFE_SETTINGS:
        raise RequestError(f"`name`: one of {', '.join(_SAFE_SETTINGS)}", "name")
    remembered = read_options(home.options)
    changed: Mapping[str, Any] = {one: remembered[one] for one in remembered if one != name}
    try:
        if text.strip():
            settings = load_settings(home, {}, {}, {**changed, name: text.strip()})
            value = getattr(settings, name)
            changed = {**changed, name: list(value) if isinstance(value, tuple) else value}
    except UsageError as error:
        raise RequestError(str(error).partition(" (`")[0], "value") from None
    write_options(home.options, changed)


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower()
