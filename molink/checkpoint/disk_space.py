"""Whether a disk has room for what is about to be written."""

import shutil
from pathlib import Path

from molink.errors import ModelError

#: Disk space that is left free, in bytes.
DISK_RESERVE_BYTES = 256 << 20
#: What else a person can do whose folder lies in molink's own one.
OTHER_HOME_HINT = ", or put molink's own folder on another disk (MOLINK_HOME)"


def check_free_space(folder: Path, nbytes: int, name: str, hint: str = "") -> None:
    """Whether there is room in a folder, which need not be there yet, for so many bytes more.

    Raises:
        ModelError: there isn't; says how much there is, how much it takes, and what to do.
    """
    there = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes + DISK_RESERVE_BYTES:
        raise ModelError(
            f"{name} needs {nbytes / 1e9:.1f} GB more on the disk of {folder}, "
            f"which has {free / 1e9:.1f} GB free. Free some space (`molink list` shows the models "
            f"here, `molink rm` deletes one){hint}"
        )
