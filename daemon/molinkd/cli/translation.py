"""Texts for people in their language; logs, JSON and the API are in English.

English texts are the keys of the catalogues in ``locale``, which ``python -m tools.translate``
makes from them.
"""

import gettext
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from molinkd.platform import user_language

#: The name of the catalogues.
_DOMAIN = "molink"
#: Where ``gettext`` looks for the language.
_VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
LOCALE = Path(str(files("molinkd"))) / "locale"


def use_own_language(arguments: Sequence[str]) -> None:
    """Use the language of ``LANGUAGE``, ``LC_ALL``, ``LC_MESSAGES`` or ``LANG``, else English.

    Where none is set, Windows knows the user's. Programs read the output of ``--json``.
    """
    if "--json" in arguments:
        return
    if not any(map(os.environ.get, _VARIABLES)):
        os.environ["LANGUAGE"] = user_language()
    gettext.bindtextdomain(_DOMAIN, LOCALE)
    # The texts of typer.
    gettext.textdomain(_DOMAIN)


def tr(text: str, **values: object) -> str:
    """Translate ``text``, then put ``values`` in place of their names in braces."""
    translated = gettext.dgettext(_DOMAIN, text)
    return translated.format(**values) if values else translated


def tr_count(one: str, many: str, count: int) -> str:
    """Translate the text for ``count``, which is {count} in both; English has these two forms."""
    return gettext.dngettext(_DOMAIN, one, many, count).format(count=count)
