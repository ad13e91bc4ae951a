"""Files locked by a virus scanner, as on Windows: briefly they can't be moved or deleted."""

from pathlib import Path
from typing import Any, Literal

import pytest

from molink import files


def lock_once(
    monkeypatch: pytest.MonkeyPatch, act: Literal["replace", "unlink"], suffix: str = ""
) -> list[Path]:
    """Refuse the first move or deletion of a file with this suffix; the list records it."""
    monkeypatch.setattr(files, "_IS_WINDOWS", True)
    monkeypatch.setattr(files, "_PAUSE_S", 0.0)
    really, seized = getattr(Path, act), list[Path]()

    def refused_once(path: Path, *arguments: Any, **options: Any) -> Any:
        if not seized and path.name.endswith(suffix):
            seized.append(path)
            raise PermissionError(13, "in use", str(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(Path, act, refused_once)
    return seized
