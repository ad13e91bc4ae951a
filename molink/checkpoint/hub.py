"""Downloads models from the Hugging Face hub into its shared cache.

The hub's library creates the cache layout and fetches small files. Weights are fetched here, so
that interrupted downloads resume; each is checked against the hub's SHA-256. The library is
imported late, since that takes half a second and most commands never need it.
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

#: Weights and metadata; no pickles.
FILE_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
#: Duplicates of the weights in the authors' own layout.
DUPLICATE_PATTERNS = ("original/*", "consolidated*", "*/*.safetensors")
#: Suffix of partial downloads.
PARTIAL_SUFFIX = ".molink"
#: Delays between attempts that bring no bytes.
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0)
_READ_TIMEOUT_S = 30.0


class ByteCounter(Protocol):
    """Counts transferred bytes."""

    total: int

    def add_bytes(self, nbytes: int) -> None:
        """Count bytes that were transferred."""

    def add_existing(self, nbytes: int) -> None:
        """Count bytes that are present already."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; only large ones have a ``sha256``."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A model at one commit, and its folder in the hub's cache."""

    id: str
    commit: str
    files: tuple[HubFile, ...]
    cache: Path

    @property
    def weight_files(self) -> tuple[HubFile, ...]:
        """Weight files, which are fetched here."""
        return tuple(file for file in self.files if file.sha256)

    def blob_path(self, file: HubFile) -> Path:
        """Path of a large file in the cache."""
        return self.cache / "blobs" / file.sha256

    def partial_path(self, file: HubFile) -> Path:
        """Path of its partial download."""
        return self.blob_path(file).with_suffix(PARTIAL_SUFFIX)

    def candidate_paths(self, file: HubFile) -> tuple[Path, Path]:
        """Paths where the complete file may be: by name, and as a blob."""
        return self.cache / "snapshots" / self.commit / file.name, self.blob_path(file)

    def count_cached_bytes(self, file: HubFile) -> int:
        """Bytes of the file that are cached."""
        sizes = map(_file_size, (*self.candidate_paths(file), self.partial_path(file)))
        return max(size for size in (0, *sizes) if size <= file.nbytes)


def find_cached(repository: str) -> Path | None:
    """Return the folder of a completely cached model, else ``None``."""
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
    """Return the first of ``files`` if all of them are cached."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = constants.HF_HUB_CACHE
    found = [try_to_load_from_cache(repository, file, cache_dir=cache) for file in files]
    return Path(str(found[0])) if all(isinstance(one, str) for one in found) else None


def find_only_gguf(repository: str) -> str | None:
    """Return the GGUF file of a repository that has exactly one GGUF model and no safetensors.

    Of a split model, it is the first file.

    Raises:
        ModelError: the repository is missing or not accessible.
        Unavailable: the hub is unreachable, and nothing is cached.
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
    """Whether all shards are present; the cache may hold parts of a repository."""
    present = {file.name for file in folder.glob("*.safetensors")}
    return bool(present) and present >= set(read_weight_map(folder).values())


def pull_model(
    repository: str, counter: ByteCounter, stop: threading.Event, layers: LayerRange | None = None
) -> Path:
    """Download a model, or only the shards with ``layers``, into the cache; return its folder.

    Raises:
        ModelNotFound: the repository is missing or not accessible.
        GatedModel: the authors require approval.
        Unavailable: the hub is unreachable, or ``stop`` was set; partial downloads are kept.
        ModelError: the disk is too small.
        BrokenModel: a file does not match the hub's hash.
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
    """Download the ``large`` files and all small ones; return their folder.

    Raises as :func:`pull_model`, and what the hub's library raises.
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
    """Download some files of a repository; return the first. Raises as :func:`pull_model`."""
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
    """Ask the hub about a model, or some ``files`` of it. Raises what its library raises."""
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
    """Check that the disk has room for what is missing of ``files``.

    Raises:
        ModelError: it has not.
    """
    missing = sum(file.nbytes - found.count_cached_bytes(file) for file in files)
    hint = ", or set HF_HOME to a folder on another disk"
    check_free_space(found.cache.parent, missing, found.id, hint)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, one) for one in FILE_PATTERNS) and not any(
        fnmatch(name, one) for one in DUPLICATE_PATTERNS
    )


def _files_of_layers(found: HubRepository, folder: Path, layers: LayerRange) -> tuple[HubFile, ...]:
    """Weight files that hold the tensors of a stage."""
    config = ModelConfig.load_folder(folder)
    first, last = layers
    if not 0 <= first < last <= config.layers:
        raise ModelError(f"{found.id} has layers 0:{config.layers}; {first}:{last} is out of range")
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
    """Fetch small files of ``names`` and link all of them into the snapshot folder."""
    from huggingface_hub import constants, snapshot_download

    # On Windows without developer mode the library copies; duplicates are removed below.
    constants.HF_HUB_DISABLE_SYMLINKS_WARNING = True
    folder = Path(
        snapshot_download(
            found.id,
            allow_patterns=sorted(names),
            cache_dir=constants.HF_HUB_CACHE,
            endpoint=constants.ENDPOINT,
        )
    )
    for file in found.weight_files:  # without links, the library made a copy
        laid_out, blob = folder / file.name, found.blob_path(file)
        if file.name in names and not laid_out.is_symlink() and laid_out.is_file():
            retry_while_busy(partial(blob.unlink, missing_ok=True))
    return folder


# --- one file --------------------------------------------------------------------------------


def _ensure_file(
    found: HubRepository, file: HubFile, counter: ByteCounter, stop: threading.Event
) -> None:
    """Download a weight file into the cache unless it is there; check its hash."""
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
    """Reuse an incomplete file in the cache as the partial download if it is longer."""
    partial_path = found.partial_path(file)
    for path in (one.resolve() for one in found.candidate_paths(file) if one.is_file()):
        if _file_size(partial_path) < _file_size(path) < file.nbytes:
            retry_while_busy(partial(path.replace, partial_path))
        elif _file_size(path) != file.nbytes:
            retry_while_busy(partial(path.unlink, missing_ok=True))


def _fetch_file(
    found: HubRepository, file: HubFile, counter: ByteCounter, stop: threading.Event
) -> None:
    """Fetch the rest of a file; retry while that makes progress."""
    partial_path = found.partial_path(file)
    fruitless = 0
    while (before := _file_size(partial_path)) < file.nbytes:
        reason = "the response was too short"
        try:
            _fetch_range(found, file, partial_path, before, counter, stop)
        except network_errors() as error:
            if is_refusal(error):
                raise
            reason = first_line(error)
        received = _file_size(partial_path)
        fruitless = 0 if received > before else fruitless + 1
        if fruitless > len(RETRY_DELAYS_S):
            raise Unavailable(
                f"the hub broke off at {received / 1e6:.0f} of {file.nbytes / 1e6:.0f} MB of "
                f"{file.name}: {reason}. The partial download is kept: run it again to resume"
            )
        if received < file.nbytes:
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
    """Request a file from byte ``begin`` on. Raises what the hub's library raises."""
    from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils._headers import build_hf_headers

    url = hf_hub_url(found.id, file.name, revision=found.commit, endpoint=constants.ENDPOINT)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={begin}-"}
    with get_session().stream("GET", url, headers=headers, timeout=_READ_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        with partial_path.open("r+b" if partial_path.is_file() else "wb") as out:
            if response.status_code != 206:  # the server ignored the range
                counter.add_existing(-begin)
                begin = 0
            out.truncate(begin)
            out.seek(begin)
            for data in response.iter_bytes():
                raise_if_stopped(found.id, stop)
                out.write(data[: file.nbytes - begin])
                begin += len(data)
                counter.add_bytes(len(data))


def network_errors() -> Any:
    """Exceptions that mean a network failure."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The HTTP client is the library's choice; its errors share this base class.
    http: Any = HfHubHTTPError.__mro__[1]
    return (http, OfflineModeIsEnabled)


def is_refusal(error: Exception) -> bool:
    """Whether the hub refused the request, so that a retry is useless."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return 400 <= status < 500 and status not in (408, 429)


def raise_if_stopped(repository: str, stop: Event) -> None:
    """Raise ``Unavailable`` if ``stop`` was set."""
    if stop.is_set():
        raise Unavailable(f"the download of {repository} was stopped; partial downloads are kept")


@contextmanager
def translate_hub_errors(repository: str) -> Iterator[None]:
    """Convert exceptions of the hub's library to molink's errors."""
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
            f"{repository} is gated: request access at {hub}/{repository}, then provide your token "
            "(`hf auth login`, or HF_TOKEN)"
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
            f"can't reach {repository} on the hub at {hub}: {first_line(error)}. Partial downloads "
            "are kept. Try again later, or use a local model folder (`--model FOLDER`)"
        ) from error
    except OSError as error:
        raise ModelError(f"can't write {repository} to the cache: {error}") from error


def first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
