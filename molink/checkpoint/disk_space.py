"""Checks free disk space before a large write."""

import shutil
from pathlib import Path

from molink.errors import ModelError

#: Bytes of disk space that must stay free.
DISK_RESERVE_BYTES = 256 << 20
#: Advice if the folder is inside molink's own.
OTHER_HOME_HINT = ", or put molink's own folder on another disk (MOLINK_HOME)"


def check_free_space(folder: Path, nbytes: int, name: str, hint: str = "") -> None:
    """Check that ``folder``, which need not exist yet, has room for ``nbytes`` more.

    Raises:
        ModelError: not enough space; tells how much is missing and what to do.
    """
    there = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes + DISK_RESERVE_BYTES:
        raise ModelError(
            f"{name} needs {nbytes / 1e9:.1f} GB more on the disk of {folder}, "
            f"which has {free / 1e9:.1f} GB free. Free some space (`molink list` shows the models "
            f"here, `molink rm` deletes one){hint}"
        )
