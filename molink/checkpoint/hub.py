"""Downloads models from the Hugging Face hub into its shared cache.

The cache has the layout of the hub's library. The library itself only sends requests and creates
links, since it would name files after the server's ETags. Here, interrupted downloads resume, and
each file is checked against the hub's hash. The library is imported late: importing it takes half a
second, and most commands never need it.

The hub, or the mirror in ``HF_ENDPOINT``, is not trusted. :func:`query_repository` checks its
names, hashes and commits before any of them becomes part of a path.
"""

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from molink.facts.layer_range import format_layers
from molink.facts.model import LayerRange
from molink.files import find_path_fault, resolve_inside, retry_while_busy
from molink.gguf.gguf_file import find_first_splits, find_mmproj

#: Weights and metadata; no pickles.
FILE_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
#: Duplicates of the weights in the authors' own layout.
DUPLICATE_PATTERNS = ("original/*", "consolidated*", "*/*.safetensors")
#: Suffix of partial downloads.
PARTIAL_SUFFIX = ".molink"
#: Delays in seconds between attempts that received no bytes.
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0)
#: A commit hash of a repository.
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
_SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
_READ_TIMEOUT_S = 30.0
#: Timeout in seconds for resolving the hub's name and connecting to it.
_CONNECT_TIMEOUT_S = 5.0
#: Maximum number of small files that are fetched at the same time.
_MAX_SMALL_FETCHES = 8
#: Bytes per read when hashing a file.
_HASHED_BYTES = 1 << 20


class ByteCounter(Protocol):
    """Counts transferred bytes."""

    total: int

    def add_bytes(self, nbytes: int) -> None:
        """Count bytes that were transferred."""

    def add_existing(self, nbytes: int) -> None:
        """Count bytes that are already present."""


class NullCounter:
    """Counts nothing."""

    total = 0

    def add_bytes(self, nbytes: int) -> None: ...

    def add_existing(self, nbytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; large ones have a ``sha256``, small ones git's ``blob_id``."""

    name: str
    nbytes: int
    sha256: str
    blob_id: str = ""

    def is_complete(self, path: Path) -> bool:
        """Whether ``path`` has the size of this file."""
        return path.is_file() and path.stat().st_size == self.nbytes

    def hash_content(self, path: Path) -> str:
        """Hash a downloaded file as the hub does."""
        if self.sha256:
            found = hashlib.sha256()
        else:
            found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        with path.open("rb") as stream:
            while data := stream.read(_HASHED_BYTES):
                found.update(data)
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A model at one commit, and its folder in the hub's cache."""

    id: str
    commit: str
    files: tuple[HubFile, ...]
    cache: Path

    @property
    def weight_files(self) -> tuple[HubFile, ...]:
        """Large files, whose progress is counted."""
        return tuple(file for file in self.files if file.sha256)

    @property
    def small_files(self) -> tuple[HubFile, ...]:
        """All other files."""
        return tuple(file for file in self.files if not file.sha256)

    @property
    def snapshot(self) -> Path:
        """Folder with the files of this commit by name."""
        return self.cache / "snapshots" / self.commit

    def blob_path(self, file: HubFile) -> Path:
        """Path of a file in the cache."""
        return self.cache / "blobs" / (file.sha256 or file.blob_id)

    def partial_path(self, file: HubFile) -> Path:
        """Path of its partial download."""
        return self.blob_path(file).with_suffix(PARTIAL_SUFFIX)

    def candidate_paths(self, file: HubFile) -> tuple[Path, Path]:
        """Paths where the complete file may be: by name, and as a blob."""
        return self.snapshot / file.name, self.blob_path(file)

    def is_cached(self, file: HubFile) -> bool:
        """Whether the complete file is cached."""
        return any(map(file.is_complete, self.candidate_paths(file)))

    def count_cached_bytes(self, file: HubFile) -> int:
        """Bytes of the file that are cached."""
        sizes = map(_file_size, (*self.candidate_paths(file), self.partial_path(file)))
        return max(size for size in (0, *sizes) if size <= file.nbytes)

    def open_slot(self, path: Path) -> Path:
        """Prepare ``path`` in this cache for writing: remove a link there, and create its folder.

        Raises:
            OSError: it is outside of the cache.
        """
        slot = resolve_inside(self.cache, path)
        slot.parent.mkdir(parents=True, exist_ok=True)
        if slot.is_symlink():
            retry_while_busy(slot.unlink)
        return slot


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
            _check_reachable()
            info = HfApi(endpoint=constants.ENDPOINT).model_info(repository)
            names = [str(one.rfilename) for one in info.siblings or ()]
    except Unavailable:
        names = _cached_names(repository)
        if not names:
            raise
    if any(fnmatch(name, "*.safetensors") for name in names):
        return None
    found = find_first_splits(name for name in names if fnmatch(name, "*.gguf"))
    for name in found:
        _check_name(repository, name)
    return found[0] if len(found) == 1 else None


def _check_reachable() -> None:
    """Check within seconds that the hub answers at all.

    The library retries for a long time, and the system's DNS resolver has no timeout of its own.

    Raises:
        Unavailable: it does not.
    """
    from huggingface_hub import constants, get_session

    failures = [f"no answer within {_CONNECT_TIMEOUT_S:g} s"]

    def connect() -> None:
        try:
            get_session().head(f"{constants.ENDPOINT}/robots.txt", timeout=_CONNECT_TIMEOUT_S)
            failures.clear()
        except network_errors() as error:
            failures[:] = [first_line(error)]

    thread = threading.Thread(target=connect, name="hub-check", daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_S)
    if failures:
        raise Unavailable(
            f"can't reach the hub at {constants.ENDPOINT}: {failures[0]}. Is this PC online?"
        )


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
        if layers is None:
            return fetch_files(found, found.weight_files, counter, stop)
        folder = fetch_files(found, (), counter, stop)
        return fetch_files(found, _files_of_layers(found, folder, layers), counter, stop)


def fetch_files(
    found: HubRepository, large: Sequence[HubFile], counter: ByteCounter, stop: threading.Event
) -> Path:
    """Download the ``large`` files and all small ones; return their folder.

    Raises as :func:`pull_model`, and what the hub's library raises.
    """
    small = found.small_files
    check_disk_space(found, (*small, *large))
    with ThreadPoolExecutor(_MAX_SMALL_FETCHES, "small-files") as pool:
        list(pool.map(lambda file: _ensure_file(found, file, NullCounter(), stop), small))
    counter.total = sum(file.nbytes for file in large)
    for file in large:
        _ensure_file(found, file, counter, stop)
    return _link_snapshot(found, (*small, *large))


def pull_file(
    repository: str, files: Sequence[str], counter: ByteCounter, stop: threading.Event
) -> Path:
    """Download some files of a repository; return the first. Raises as :func:`pull_model`."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    with translate_hub_errors(repository):
        disable_progress_bars()
        found = query_repository(repository, files=files)
        return fetch_files(found, found.weight_files, counter, stop) / files[0]


def query_repository(
    repository: str, commit: str | None = None, files: Sequence[str] = ()
) -> HubRepository:
    """Ask the hub about a model, or some ``files`` of it.

    A GGUF file comes with that of its vision tower.

    Raises what the hub's library raises, and:
        BrokenModel: a file is missing, or a name, hash or size is not what a hub may give.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    _check_reachable()
    info = HfApi(endpoint=constants.ENDPOINT).model_info(
        repository, revision=commit, files_metadata=True
    )
    listed = [(str(one.rfilename), one) for one in info.siblings or ()]
    tower = find_mmproj(files[0], (name for name, _ in listed)) if files else None
    found = tuple(
        _check_file(repository, name, one)
        for name, one in listed
        if (name in files or name == tower if files else _is_wanted(name))
    )
    wanted = files or ("*.safetensors",)
    missing = [name for name in wanted if not any(fnmatch(one.name, name) for one in found)]
    if missing:
        ggufs = [name for name, _ in listed if fnmatch(name, "*.gguf")]
        raise BrokenModel(_missing_file_error(repository, missing[0] if files else "", ggufs))
    if COMMIT_PATTERN.fullmatch(str(info.sha)) is None:
        raise _refuse_listing(repository, f"gives its commit as {_quote(info.sha)}")
    folder = repo_folder_name(repo_id=repository, repo_type="model")
    cache = Path(constants.HF_HUB_CACHE).resolve() / folder
    return HubRepository(repository, str(info.sha), found, cache)


def _check_file(repository: str, name: str, listed: Any) -> HubFile:
    """Check an entry of the hub's list of files."""
    _check_name(repository, name)
    size, lfs = listed.size, listed.lfs
    if not isinstance(size, int) or size < 0:
        raise _refuse_listing(repository, f"gives the size of {name} as {_quote(size)}")
    pattern, digest = (
        (COMMIT_PATTERN, listed.blob_id) if lfs is None else (_SHA256_PATTERN, lfs.sha256)
    )
    if pattern.fullmatch(str(digest)) is None:
        raise _refuse_listing(repository, f"gives the hash of {name} as {_quote(digest)}")
    return HubFile(name, size, "", digest) if lfs is None else HubFile(name, size, digest)


def _check_name(repository: str, name: str) -> None:
    if fault := find_path_fault(name):
        raise _refuse_listing(repository, f"has a file {_quote(name)}, a name that {fault}")


def _refuse_listing(repository: str, reason: str) -> BrokenModel:
    return BrokenModel(
        f"{repository} on the hub {reason}. Nothing of it was fetched: this hub, or the mirror in "
        "HF_ENDPOINT, can't be trusted"
    )


def _quote(value: object) -> str:
    """Quote the start of a hub's answer without control characters, for error messages."""
    return ascii(str(value)[:200])


def _missing_file_error(repository: str, file: str, ggufs: list[str]) -> str:
    safe = [name for name in find_first_splits(ggufs) if not find_path_fault(name)]
    named = ", ".join(f"{repository}/{name}" for name in safe[:8])
    hint = f". Name one of its GGUF files: {named}" if named else ""
    return f"{repository} on the hub has no {file or '*.safetensors, which molink reads'}{hint}"


def check_disk_space(found: HubRepository, files: Sequence[HubFile]) -> None:
    """Check that the disk has room for the missing parts of ``files``.

    Raises:
        ModelError: not enough space.
    """
    missing = sum(file.nbytes - found.count_cached_bytes(file) for file in files)
    hint = ", or set HF_HOME to a folder on another disk"
    check_free_space(found.cache.parent, missing, found.id, hint)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, one) for one in FILE_PATTERNS) and not any(
        fnmatch(name, one) for one in DUPLICATE_PATTERNS
    )


def _files_of_layers(found: HubRepository, folder: Path, layers: LayerRange) -> tuple[HubFile, ...]:
    """List the weight files that hold the tensors of a stage."""
    config = ModelConfig.load_folder(folder)
    first, last = layers
    if not 0 <= first < last <= config.layers:
        wanted = format_layers(layers)
        raise ModelError(f"{found.id} has layers 1-{config.layers}; {wanted} is out of range")
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


def _link_snapshot(found: HubRepository, files: Iterable[HubFile]) -> Path:
    """Link cached files into the snapshot folder, and make it the newest."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import (
        _cache_commit_hash_for_specific_revision,
        _create_symlink,
    )

    # On Windows without developer mode there are no links: the library copies the file, or moves it
    # if ``new_blob`` is set. A large file is moved to the last of its names.
    constants.HF_HUB_DISABLE_SYMLINKS_WARNING = True
    missing = [file for file in files if not file.is_complete(found.snapshot / file.name)]
    last_names = {file.sha256: file.name for file in missing if file.sha256}
    for file in missing:
        laid_out, blob = found.candidate_paths(file)
        is_last = last_names.get(file.sha256) == file.name
        _create_symlink(str(blob), str(found.open_slot(laid_out)), new_blob=is_last)
    found.open_slot(found.cache / "refs" / "main")
    _cache_commit_hash_for_specific_revision(str(found.cache), "main", found.commit)
    return found.snapshot


# --- one file --------------------------------------------------------------------------------


def _ensure_file(
    found: HubRepository, file: HubFile, counter: ByteCounter, stop: threading.Event
) -> None:
    """Download a file into the cache unless it is there; check its hash."""
    from huggingface_hub.utils._fixes import WeakFileLock

    partial_path = found.open_slot(found.partial_path(file))
    with WeakFileLock(found.open_slot(partial_path.with_suffix(".lock"))):
        counter.add_existing(found.count_cached_bytes(file))
        if found.is_cached(file) and not partial_path.is_file():
            return
        _reopen_partial(found, file, partial_path)
        _fetch_file(found, file, partial_path, counter, stop)
        digest, expected = file.hash_content(partial_path), file.sha256 or file.blob_id
        if digest != expected:
            retry_while_busy(partial_path.unlink)
            raise BrokenModel(
                f"{file.name} of {found.id} is not what the hub says it is (hash {digest[:16]}… "
                f"instead of {expected[:16]}…). It was deleted: pull it again"
            )
        blob = resolve_inside(found.cache, found.blob_path(file))
        retry_while_busy(lambda: partial_path.replace(blob))


def _reopen_partial(found: HubRepository, file: HubFile, partial_path: Path) -> None:
    """Reuse an incomplete file in the cache as the partial download if it is longer.

    Links are deleted, never followed: they point to the blob or outside the cache.
    """
    for path in found.candidate_paths(file):
        entry, size = resolve_inside(found.cache, path), _file_size(path)
        if entry.is_symlink():
            if size != file.nbytes:
                retry_while_busy(entry.unlink)
        elif entry.is_file():
            if _file_size(partial_path) < size < file.nbytes:
                retry_while_busy(partial(entry.replace, partial_path))
            elif size != file.nbytes:
                retry_while_busy(partial(entry.unlink, missing_ok=True))
    if not file.nbytes:
        partial_path.touch()


def _fetch_file(
    found: HubRepository,
    file: HubFile,
    partial_path: Path,
    counter: ByteCounter,
    stop: threading.Event,
) -> None:
    """Fetch the rest of a file; retry as long as attempts make progress."""
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

    # The library chooses the HTTP client; all its errors share this base class.
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
            f"can't reach {repository} on the hub at {hub}: {first_line(error)}. Try again "
            "later (it resumes), or name a folder or GGUF file of this PC"
        ) from error
    except OSError as error:
        raise ModelError(f"can't write {repository} to the cache: {error}") from error


def first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
