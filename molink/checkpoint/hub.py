"""Models from the Hugging Face hub, into its own cache, where other programs find them too.

The hub's library lays the cache out and fetches the small files. Weights are fetched here: what is
there of a file when the line breaks or the program ends is kept, and the rest fetched the next
time. Each is checked against the SHA-256 that the hub names. The library is imported late: that
takes half a second, and most commands never need it.

What the Hugging Face hub's library raises, as errors of ours.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.disk_space import check_free_space
from molink.checkpoint.model_folder import read_weight_map
from molink.checkpoint.stacked_experts import stack_names
from molink.checkpoint.tensor_layout import stage_tensors
from molink.errors import (
    BrokenModel,
    GatedModel,
    ModelError,
    ModelNotFound,
    MolinkError,
    Unavailable,
)
from molink.facts.model import LayerRange
from molink.files import retry_while_busy
from molink.gguf.gguf_file import find_first_splits

#: What is fetched: weights and metadata, no pickles.
FILE_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
#: The same weights again, in the layout of the model's authors.
DUPLICATE_PATTERNS = ("original/*", "consolidated*", "*/*.safetensors")
#: How files end of which only a part has come.
PARTIAL_SUFFIX = ".molink"
#: A file is asked for so often without one more byte, after pauses of so many seconds.
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0)
#: Seconds until a silent line is given up.
_READ_TIMEOUT_S = 30.0


class ByteCounter(Protocol):
    """Is told how far it is, in bytes."""

    total: int

    def add_bytes(self, nbytes: int) -> None:
        """So many more have come."""

    def add_existing(self, nbytes: int) -> None:
        """So many lie here already."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. ``sha256`` is known of large ones only."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A model on the hub, as it is at one commit, and the folder that it has in the cache."""

    id: str
    commit: str
    files: tuple[HubFile, ...]
    cache: Path

    @property
    def weight_files(self) -> tuple[HubFile, ...]:
        """The files that are fetched here."""
        return tuple(file for file in self.files if file.sha256)

    def blob_path(self, file: HubFile) -> Path:
        """Where the cache keeps a large file."""
        return self.cache / "blobs" / file.sha256

    def partial_path(self, file: HubFile) -> Path:
        """What has come of it so far."""
        return self.blob_path(file).with_suffix(PARTIAL_SUFFIX)

    def candidate_paths(self, file: HubFile) -> tuple[Path, Path]:
        """Where a large file may lie whole: by its name, and as a blob."""
        return self.cache / "snapshots" / self.commit / file.name, self.blob_path(file)

    def count_cached_bytes(self, file: HubFile) -> int:
        """Bytes of it that need not be fetched."""
        sizes = map(_file_size, (*self.candidate_paths(file), self.partial_path(file)))
        return max(size for size in (0, *sizes) if size <= file.nbytes)


def find_cached(repository: str) -> Path | None:
    """The folder of a model that lies whole in the cache; ``None`` if it doesn't."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            repository,
            allow_patterns=[*FILE_PATTERNS],
            ignore_patterns=[*DUPLICATE_PATTERNS],
            local_files_only=True,
            cache_dir=constants.HF_HUB_CACHE,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(found) if has_weights(Path(found)) else None


def find_cached_file(repository: str, files: Sequence[str]) -> Path | None:
    """The first of some files of a repository, if they all lie in the cache."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = constants.HF_HUB_CACHE
    found = [try_to_load_from_cache(repository, file, cache_dir=cache) for file in files]
    return Path(str(found[0])) if all(isinstance(one, str) for one in found) else None


def find_only_gguf(repository: str) -> str | None:
    """The GGUF file (its first part) of a repository that has one model in such, no safetensors.

    Raises:
        ModelError: the hub has no such repository, or doesn't show it to us.
        Unavailable: the hub can't be reached, and nothing of it is in the cache.
    """
    from huggingface_hub import HfApi, constants

    try:
        with translate_hub_errors(repository):
            info = HfApi(endpoint=constants.ENDPOINT).model_info(repository)
            names = [one.rfilename for one in info.siblings or ()]
    except Unavailable:
        names = _cached_names(repository)
        if not names:
            raise
    if any(fnmatch(name, "*.safetensors") for name in names):
        return None
    found = find_first_splits(name for name in names if fnmatch(name, "*.gguf"))
    return found[0] if len(found) == 1 else None


def _cached_names(repository: str) -> list[str]:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    found = (cache / "snapshots").glob("*/**/*.*")
    return [Path(*path.relative_to(cache).parts[2:]).as_posix() for path in found]


def has_weights(folder: Path) -> bool:
    """Whether all shards are there; the cache may hold a part of a repository."""
    present = {file.name for file in folder.glob("*.safetensors")}
    return bool(present) and present >= set(read_weight_map(folder).values())


def pull_model(
    repository: str,
    counter: ByteCounter,
    stop: threading.Event,
    layers: LayerRange | None = None,
) -> Path:
    """Have a model in the cache, or the shards that have ``layers``; returns its folder.

    Raises:
        ModelNotFound: the hub has none of that name, or doesn't show it to us.
        GatedModel: its authors want to be asked first.
        Unavailable: the hub can't be reached or breaks off, or ``stop`` was set; what has come is
            kept.
        ModelError: the disk is too small.
        BrokenModel: what came isn't what the hub says.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with translate_hub_errors(repository):
        found = query_repository(repository)
        small = {file.name for file in found.files} - {file.name for file in found.weight_files}
        folder = _link_snapshot(found, small)
        weights = found.weight_files if layers is None else _files_of_layers(found, folder, layers)
        return fetch_files(found, weights, counter, stop)


def fetch_files(
    found: HubRepository, large: Sequence[HubFile], counter: ByteCounter, stop: threading.Event
) -> Path:
    """Have the ``large`` files and all small ones in the cache; returns their folder.

    Raises as :func:`pull_model`, and what the hub's library does.
    """
    check_disk_space(found, large)
    counter.total = sum(file.nbytes for file in large)
    for file in large:
        _ensure_file(found, file, counter, stop)
    small = {file.name for file in found.files} - {file.name for file in found.weight_files}
    return _link_snapshot(found, small | {file.name for file in large})


def pull_file(
    repository: str, files: Sequence[str], counter: ByteCounter, stop: threading.Event
) -> Path:
    """Have some files of a repository in the cache; returns the first. Raises as
    :func:`pull_model`."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    with translate_hub_errors(repository):
        disable_progress_bars()
        found = query_repository(repository, files=files)
        check_disk_space(found, found.weight_files)
        counter.total = sum(one.nbytes for one in found.weight_files)
        for one in found.weight_files:
            _ensure_file(found, one, counter, stop)
        return _link_snapshot(found, {*files}) / files[0]


def query_repository(
    repository: str, commit: str | None = None, files: Sequence[str] = ()
) -> HubRepository:
    """Ask the hub what a model, or some ``files`` of it, are. Raises what its library does."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    info = HfApi(endpoint=constants.ENDPOINT).model_info(
        repository, revision=commit, files_metadata=True
    )
    found = tuple(
        HubFile(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs is not None else "")
        for one in info.siblings or ()
        if (one.rfilename in files if files else _is_wanted(one.rfilename))
    )
    wanted = files or ("*.safetensors",)
    missing = [name for name in wanted if not any(fnmatch(one.name, name) for one in found)]
    if missing:
        ggufs = [one.rfilename for one in info.siblings or () if fnmatch(one.rfilename, "*.gguf")]
        raise BrokenModel(_missing_file_error(repository, missing[0] if files else "", ggufs))
    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    return HubRepository(repository, str(info.sha), found, cache)


def _missing_file_error(repository: str, file: str, ggufs: list[str]) -> str:
    named = ", ".join(f"{repository}/{name}" for name in find_first_splits(ggufs)[:8])
    hint = f". Name one of its GGUF files: {named}" if named else ""
    return f"{repository} on the hub has no {file or '*.safetensors, which molink reads'}{hint}"


def check_disk_space(found: HubRepository, files: Sequence[HubFile]) -> None:
    """Whether there is room for what is missing of ``files``.

    Raises:
        ModelError: there isn't; says how much there is, how much it takes, and what to do.
    """
    missing = sum(file.nbytes - found.count_cached_bytes(file) for file in files)
    hint = ", or set HF_HOME to a folder on another disk"
    check_free_space(found.cache.parent, missing, found.id, hint)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, one) for one in FILE_PATTERNS) and not any(
        fnmatch(name, one) for one in DUPLICATE_PATTERNS
    )


def _files_of_layers(found: HubRepository, folder: Path, layers: LayerRange) -> tuple[HubFile, ...]:
    """The files of weights that hold the tensors of a stage."""
    config = ModelConfig.load_folder(folder)
    first, last = layers
    if not 0 <= first < last <= config.layers:
        raise ModelError(f"{found.id} has layers 0:{config.layers}; {first}:{last} is no part")
    tensors = stage_tensors(config, first, last)
    modules = [name.removesuffix("weight") for name in tensors]
    shards = read_weight_map(folder)
    if not shards:
        return found.weight_files
    modules += {stack for name in tensors for stack in stack_names(name, shards)}
    needed = {
        file for name, file in shards.items() if any(name.startswith(module) for module in modules)
    }
    return tuple(file for file in found.weight_files if file.name in needed)


def _link_snapshot(found: HubRepository, names: set[str]) -> Path:
    """Have ``names`` in the snapshot's folder: small ones are fetched, large ones are there."""
    from huggingface_hub import constants, snapshot_download

    # Windows has links for developers only; what is twice then is removed below.
    constants.HF_HUB_DISABLE_SYMLINKS_WARNING = True
    folder = Path(
        snapshot_download(
            found.id,
            allow_patterns=sorted(names),
            cache_dir=constants.HF_HUB_CACHE,
            endpoint=constants.ENDPOINT,
        )
    )
    for file in found.weight_files:  # where there are no links, the library has made a copy
        laid_out, blob = folder / file.name, found.blob_path(file)
        if file.name in names and not laid_out.is_symlink() and laid_out.is_file():
            retry_while_busy(partial(blob.unlink, missing_ok=True))
    return folder


# --- one file --------------------------------------------------------------------------------


def _ensure_file(
    found: HubRepository, file: HubFile, counter: ByteCounter, stop: threading.Event
) -> None:
    """Have a file of weights in the cache, whole and right."""
    from huggingface_hub.utils._fixes import WeakFileLock

    blob, partial_path = found.blob_path(file), found.partial_path(file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(partial_path.with_suffix(".lock")):
        counter.add_existing(found.count_cached_bytes(file))
        if found.count_cached_bytes(file) == file.nbytes and not partial_path.is_file():
            return
        _reopen_partial(found, file)
        _fetch_file(found, file, counter, stop)
        with partial_path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            retry_while_busy(partial_path.unlink)
            raise BrokenModel(
                f"{file.name} of {found.id} is not what the hub says it is (SHA-256 {digest[:16]}… "
                f"instead of {file.sha256[:16]}…). It was deleted: pull it again"
            )
        retry_while_busy(lambda: partial_path.replace(blob))


def _reopen_partial(found: HubRepository, file: HubFile) -> None:
    """What counts as whole and isn't, by its size, is a draft again if more of it is there."""
    partial_path = found.partial_path(file)
    for path in (one.resolve() for one in found.candidate_paths(file) if one.is_file()):
        if _file_size(partial_path) < _file_size(path) < file.nbytes:
            retry_while_busy(partial(path.replace, partial_path))
        elif _file_size(path) != file.nbytes:
            retry_while_busy(partial(path.unlink, missing_ok=True))


def _fetch_file(
    found: HubRepository, file: HubFile, counter: ByteCounter, stop: threading.Event
) -> None:
    """Fetch what is missing of a file, again and again while that brings anything."""
    partial_path = found.partial_path(file)
    fruitless = 0
    while (before := _file_size(partial_path)) < file.nbytes:
        reason = "it sent too little"
        try:
            _fetch_range(found, file, partial_path, before, counter, stop)
        except network_errors() as error:
            if is_refusal(error):
                raise
            reason = first_line(error)
        here = _file_size(partial_path)
        fruitless = 0 if here > before else fruitless + 1
        if fruitless > len(RETRY_DELAYS_S):
            raise Unavailable(
                f"the hub broke off at {here / 1e6:.0f} of {file.nbytes / 1e6:.0f} MB of "
                f"{file.name}: {reason}. What has come is kept: run it again to go on from there"
            )
        if here < file.nbytes:
            stop.wait(RETRY_DELAYS_S[max(0, fruitless - 1)])
            raise_if_stopped(found.id, stop)


def _file_size(partial_path: Path) -> int:
    return partial_path.stat().st_size if partial_path.is_file() else 0


def _fetch_range(
    found: HubRepository,
    file: HubFile,
    partial_path: Path,
    begin: int,
    counter: ByteCounter,
    stop: threading.Event,
) -> None:
    """One request for a file from byte ``begin`` on. Raises what the hub's library does."""
    from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils._headers import build_hf_headers

    url = hf_hub_url(found.id, file.name, revision=found.commit, endpoint=constants.ENDPOINT)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={begin}-"}
    with get_session().stream("GET", url, headers=headers, timeout=_READ_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        with partial_path.open("r+b" if partial_path.is_file() else "wb") as out:
            if response.status_code != 206:  # all of it comes
                counter.add_existing(-begin)
                begin = 0
            out.truncate(begin)
            out.seek(begin)
            for piece in response.iter_bytes():
                raise_if_stopped(found.id, stop)
                out.write(piece[: file.nbytes - begin])
                begin += len(piece)
                counter.add_bytes(len(piece))


def network_errors() -> Any:
    """What is raised where the line is the reason."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The library's HTTP client isn't ours to name: all its errors have the same base.
    http: Any = HfHubHTTPError.__mro__[1]
    return (http, OfflineModeIsEnabled)


def is_refusal(error: Exception) -> bool:
    """Whether the hub itself says no, so that to ask again is no use."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return 400 <= status < 500 and status not in (408, 429)


def raise_if_stopped(repository: str, stop: Event) -> None:
    """Raise ``Unavailable`` if ``stop`` was set."""
    if stop.is_set():
        raise Unavailable(f"fetching {repository} was ended; what has come is kept")


@contextmanager
def translate_hub_errors(repository: str) -> Iterator[None]:
    """What the hub's library raises, as errors of ours."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except MolinkError:
        raise
    except GatedRepoError as error:
        raise GatedModel(
            f"{repository} is gated: its authors want to be asked first. Accept their terms at "
            f"{hub}/{repository}, then give your token (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"no model {repository!r} at {hub}: is the name right (OWNER/NAME)? A private one "
            "needs your token (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, *network_errors()) as error:
        if is_refusal(error):
            raise GatedModel(f"{hub} refuses {repository}: {first_line(error)}") from error
        raise Unavailable(
            f"the hub at {hub} can't give {repository} now: {first_line(error)}. What has come is "
            "kept. Try again later, or take a model folder from elsewhere (`--model FOLDER`)"
        ) from error
    except OSError as error:
        raise ModelError(f"can't write {repository} to the cache: {error}") from error


def first_line(error: Exception) -> str:
    """The first line of what it says."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
