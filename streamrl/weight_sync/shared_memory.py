"""Weights through a directory in shared memory: one safetensors file per version, and LATEST, a small JSON.

    v00000042.safetensors   full tensors, Hugging Face names, header metadata {"version": "42", "format": "pt"}
    LATEST                  {"version": 42, "path": "<dir>/v00000042.safetensors"}

Both appear by rename, the file first, so a reader sees a whole version or none, and a writer that is killed leaves at
most a temporary file, which the next write removes. The file just written and the one LATEST named before are kept, in
order of publishing and not of number: a run restored to an older step may publish smaller versions. A reader that has a
file mapped keeps its bytes although the name is gone.

A version may be complete before it is published (`begin`, `finish`; `publish` once servers have it). Everything is
synced before it is renamed: in shared memory that costs nothing and survives the death of any process; on a disk it
survives the machine's, so the same directory on a shared file system is how weights travel between nodes.

The directory lies where every user of the machine may make one (/dev/shm) under a name that can be guessed. So it is
0700, its files are 0600, and one that is a link, somebody else's, or open to others is neither written nor read.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.weight_sync.delta_files import SUFFIX, chain_of, read_chain
from streamrl.weight_sync.mapped import map_tensors, recyclable
from streamrl.weight_sync.protocol import (
    WeightInfo,
    WeightsDamaged,
    WeightsMissing,
    WeightsNotPrivate,
    WeightsNotWritten,
)
from streamrl.weight_sync.removing import remove

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.weight_sync.protocol import State

LATEST = "LATEST"


class WeightStore:
    """The versions in one directory. Implements `WeightSync`.

    Invariants: what LATEST names is complete; the version LATEST named before is still there.
    """

    def __init__(self, directory: str | os.PathLike[str], *, older: int = 0, keep: int = 2) -> None:
        """`older`: so many versions just below the one written stay, whatever LATEST named (deterministic mode); so do
        the `keep` last written, LATEST's among them."""
        self.directory = Path(directory).absolute()
        self._older, self._keep = older, keep

    def path(self, version: int) -> Path:
        """The file of a version, there or not."""
        return self.directory / f"v{version:08d}.safetensors"

    def write(self, state: State, version: int) -> WeightInfo:
        """Publish `state` as `version`; tensors that are one tensor under two names (tied) are written once.

        Raises ValueError for a negative version or an empty state, OSError when the directory is full,
        WeightsNotPrivate.
        """
        from safetensors.torch import save_file

        from streamrl.weight_sync.digest import weights_digest

        began = time.perf_counter()
        self._check(version)
        tensors = _writable(state)
        self.begin(version)
        temporary = self.temporary(version)
        try:
            save_file(tensors, temporary, metadata={"version": str(version), "format": "pt"})
            temporary.chmod(0o600)
            sync(temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        path = self.finish(version)
        size, digest = path.stat().st_size, weights_digest(tensors.items())
        self.publish(version, path)
        return WeightInfo(version, str(path), size, time.perf_counter() - began, digest)

    # A version that becomes complete first, and findable later.

    def temporary(self, version: int) -> Path:
        """Where it is written until it is complete: the same for all ranks that write it."""
        return self.directory / f".{self.path(version).name}.tmp"

    def begin(self, version: int, size: int = 0) -> None:
        """Room for `size` bytes at `temporary`, in a directory that is ours. Raises ValueError, WeightsNotPrivate, and
        WeightsNotWritten where the file system has less room than that."""
        self._check(version)
        make_private(self.directory)
        self._remove_leftovers()
        held = self._take_oldest(version) if size else 0
        found = os.statvfs(self.directory)
        if size > (free := held + found.f_bavail * found.f_frsize):
            raise WeightsNotWritten(
                f"no room for version {version} of the weights in {self.directory}: it takes {size / 2**20:.1f} MiB, "
                f"{free / 2**20:.1f} are free; free some or choose another"
            )

    def _take_oldest(self, version: int) -> int:
        """Write over a file that was to go anyway, and that nobody has mapped: fresh pages cost several times the copy
        that fills them. Its size. Not where `older` ones are kept: a checkpoint may be copying them."""
        if self._older:
            return 0
        keep = self._needed(self._latest_name(), *self._older_names(version))
        found = sorted(self.directory.glob("v*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        if len(found) < self._keep:
            return 0
        for path in found:
            if path.name not in keep and recyclable(path, temporary := self.temporary(version)):
                return temporary.stat().st_size
        return 0

    def _older_names(self, version: int) -> set[str]:
        return {self.path(each).name for each in range(max(0, version - self._older), version)}

    def finish(self, version: int) -> Path:
        """What lies at `temporary` is complete: rename it, and let older ones go. LATEST still names what it named."""
        path = self.path(version)
        os.replace(self.temporary(version), path)
        sync(self.directory)
        self.retire(path.name, *self._older_names(version))
        return path

    def publish(self, version: int, path: str | os.PathLike[str]) -> None:
        """From now on LATEST names it: what starts or joins begins with it."""
        temporary = self.directory / f".{LATEST}.{os.getpid()}.tmp"
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps({"version": version, "path": str(path)}))
        sync(temporary)
        os.replace(temporary, self.directory / LATEST)
        sync(self.directory)

    def latest(self) -> WeightInfo | None:
        """What LATEST names, None before the first version.

        Raises WeightsDamaged, WeightsMissing, WeightsNotPrivate.
        """
        pointer, text = self.directory / LATEST, self._pointer()
        if text is None:
            return None
        try:
            entry = json.loads(text)
            version, path = entry["version"], entry["path"]
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsDamaged(f"{pointer} is no {{version, path}} JSON ({error}); publish again") from error
        if type(version) is not int or version < 0 or not isinstance(path, str):
            raise WeightsDamaged(f"{pointer} names version {version!r} at {path!r}; remove it or publish again")
        # The name counts, not the directory: the run directory may have been moved or mounted elsewhere.
        path = str(self.directory / Path(path).name)
        try:
            return WeightInfo(version, path, os.stat(path).st_size)
        except FileNotFoundError as error:
            raise WeightsMissing(f"{pointer} names version {version}; {path} is not there; publish again") from error

    def read(self, path: str) -> dict[str, Tensor]:
        """Tensors mapped from the file; copy them before the file's bytes may change hands. See `read_weights`."""
        return read_weights(path)

    def read_latest(self) -> tuple[WeightInfo, dict[str, Tensor]] | None:
        """The newest version with its tensors, also while a writer retires files; None before the first version."""
        while True:
            named = self._pointer()
            try:
                info = self.latest()
                return None if info is None else (info, read_weights(info.path))
            except WeightsMissing:
                if self._pointer() == named:  # else the file was retired meanwhile, and a newer version is there
                    raise

    def _pointer(self) -> str | None:
        try:
            check_private(self.directory)
            return (self.directory / LATEST).read_text()
        except FileNotFoundError:
            return None

    def _check(self, version: int) -> None:
        if version < 0:
            raise ValueError(f"weight version {version}: versions count from 0 (the base model)")

    def _latest_name(self) -> str:
        try:
            info = self.latest()
        except (WeightsDamaged, WeightsMissing):
            return ""
        return Path(info.path).name if info else ""

    def retire(self, *names: str) -> None:
        """Remove all versions but these, LATEST's, what those are made of, and the last ones written as long as there
        is place among the `keep`."""
        keep = self._needed(self._latest_name(), *names)
        found = sorted(self._versions(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        places = self._keep - sum(path.name in keep for path in found)
        for path in found:
            if path.name in keep:
                continue
            places -= 1
            if places < 0:
                remove(path)
            else:
                keep |= self._needed(path.name)

    def _versions(self) -> list[Path]:
        return [path for path in self.directory.glob("v*") if path.suffix in (".safetensors", SUFFIX)]

    def _needed(self, *names: str) -> set[str]:
        return set().union(*(chain_of(self.directory, name) for name in names if name))

    def _remove_leftovers(self) -> None:
        """There is one writer, so a temporary file found before writing is a dead writer's."""
        for path in self.directory.glob(".*.tmp"):
            remove(path)


def publish(info: WeightInfo) -> None:
    """A staged version is the newest from now on."""
    WeightStore(Path(info.path).parent).publish(info.version, info.path)


def make_private(directory: Path) -> None:
    """The directory of a `WeightStore`, made unless it is there. Raises WeightsNotPrivate."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        check_private(directory)


def check_private(directory: Path) -> None:
    """Raises WeightsNotPrivate unless `directory` is a real one, of this user, closed to others; FileNotFoundError."""
    found = directory.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is no directory (a link is not followed)"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif mode & 0o077:
        wrong = f"is open to others (mode {mode:04o}, must be 0700)"
    else:
        return
    raise WeightsNotPrivate(f"weights directory {directory} {wrong}: weights in it may not be ours; remove it")


def sync(path: Path) -> None:
    """A file or directory is on its disk, if it lies on one."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of one version, full, wherever it lies. Raises WeightsMissing, WeightsDamaged."""
    return read_chain(path) if path.endswith(SUFFIX) else map_tensors(path)


def _writable(state: State) -> dict[str, Tensor]:
    """On the CPU, contiguous, and each storage under its first name only (safetensors refuses aliases)."""
    named = isinstance(state, Mapping)
    pairs: Any = state.items() if isinstance(state, Mapping) else state
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[object, ...], Tensor] = {}  # holds the tensors: a freed one's address may be another's soon
    for name, tensor in pairs:
        if named or tensor.device.type == "cpu":  # streamed from a device: not held, so aliases are written twice
            alias = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.numel() and alias in seen:
                continue
            seen[alias] = tensor
        value = tensor.detach().to("cpu")
        # A view into a larger tensor (a fused projection) is copied, so that only its own bytes are written.
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.element_size()
        tensors[name] = value if whole else value.contiguous().clone()
    if not tensors:
        raise ValueError("no tensors to publish: the state is empty")
    return tensors
