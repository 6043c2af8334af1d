"""Weights through a directory in shared memory: one safetensors file per version, and LATEST, a small JSON.

    v00000042.safetensors   full tensors, Hugging Face names, header metadata {"version": "42", "format": "pt"}
    LATEST                  which version is in service, and checksums (weight_sync/pointer.py)

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

import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.weight_sync.delta_files import SUFFIX, chain_of, read_chain
from streamrl.weight_sync.mapped import map_tensors, recyclable
from streamrl.weight_sync.pointer import LATEST, Pointer
from streamrl.weight_sync.protocol import (
    WeightError,
    WeightInfo,
    WeightsDamaged,
    WeightsMissing,
    WeightsNotPrivate,
    WeightsNotWritten,
)
from streamrl.weight_sync.removing import remove
from streamrl.weight_sync.saving import not_written, save, sync

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.weight_sync.protocol import State


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

        Raises ValueError for a negative version or an empty state, WeightsNotWritten when the directory is full,
        WeightsNotPrivate.
        """
        from streamrl.weight_sync.digest import weights_digest

        began = time.perf_counter()
        self._check(version)
        tensors = _writable(state)
        temporary = self.temporary(version)
        try:
            self.begin(version)
            try:
                save(tensors, temporary, {"version": str(version), "format": "pt"})
                path = self.finish(version)
            except BaseException:
                remove(temporary)
                raise
        except WeightError:
            raise
        except OSError as error:
            raise not_written(version, self.directory, error) from error
        size, digest = path.stat().st_size, weights_digest(tensors.items())
        self.publish(version, path, digest)
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
        self.forget_digests(path.name)
        os.replace(self.temporary(version), path)
        sync(self.directory)
        self.retire(path.name, *self._older_names(version))
        return path

    def publish(self, version: int, path: str | os.PathLike[str], digest: str = "") -> None:
        """From now on LATEST names it: what starts or joins begins with it, if it has this checksum (empty: not known).
        Whatever stood there before is replaced. Raises WeightsNotWritten."""
        name = Path(path).name
        digests = dict(before.digests) if (before := self._pointer_if_whole()) else {}
        digests.pop(name, None)
        try:
            Pointer(version, name, digests | ({name: digest} if digest else {})).write(self.directory)
        except OSError as error:
            raise not_written(version, self.directory, error) from error

    def latest(self) -> WeightInfo | None:
        """What LATEST names, None before the first version.

        Raises WeightsDamaged, WeightsMissing, WeightsNotPrivate.
        """
        named = self._pointer()
        if named is None:
            return None
        pointer, path = self.directory / LATEST, str(self.directory / named.name)
        try:
            return WeightInfo(named.version, path, os.stat(path).st_size, digest=named.digests.get(named.name, ""))
        except FileNotFoundError as error:
            raise WeightsMissing(
                f"{pointer} names version {named.version}; {path} is not there; publish again"
            ) from error
        except OSError as error:
            raise WeightsDamaged(f"{pointer} names version {named.version} at {path}: {error}") from error

    def digest_of(self, path: str | os.PathLike[str]) -> str:
        """The trainer's checksum of a version in this directory, as LATEST has it; empty: not known. Raises
        WeightsDamaged."""
        named = self._pointer()
        return named.digests.get(Path(path).name, "") if named else ""

    def forget_digests(self, *names: str) -> None:
        """Files of these names are about to have other contents than those that were published."""
        named = self._pointer_if_whole()
        if named is not None and any(name in named.digests for name in names):
            named.without(*names).write(self.directory)

    def read(self, path: str) -> dict[str, Tensor]:
        """Tensors mapped from the file; copy them before the file's bytes may change hands. See `read_weights`."""
        return read_weights(path)

    def read_latest(self) -> tuple[WeightInfo, dict[str, Tensor]] | None:
        """The newest version with its tensors, which are the trainer's to the bit as far as its checksum is known; also
        while a writer retires files. None before the first version. Raises as `latest`, and WeightsDamaged for another
        checksum."""
        from streamrl.weight_sync.digest import checked_digest

        while True:
            named = self._pointer()
            try:
                if (info := self.latest()) is None:
                    return None
                tensors = read_weights(info.path)
                if info.digest:
                    checked_digest(tensors, info)
                return info, tensors
            except (WeightsMissing, WeightsDamaged):
                if self._pointer() == named:  # else the file was retired meanwhile, and a newer version is there
                    raise

    def _pointer(self) -> Pointer | None:
        try:
            check_private(self.directory)
        except FileNotFoundError:
            return None
        return Pointer.read(self.directory)

    def _pointer_if_whole(self) -> Pointer | None:
        try:
            return self._pointer()
        except WeightsDamaged:
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
    WeightStore(Path(info.path).parent).publish(info.version, info.path, info.digest)


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
