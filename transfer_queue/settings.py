"""What `init` takes: our own keys, and TransferQueue's tree, of which some keys mean something here."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transfer_queue.errors import Invalid
from transfer_queue.net.addresses import check_address
from transfer_queue.sampler import sampler_spec

log = logging.getLogger(__name__)

BACKENDS = ("SimpleStorage", "MooncakeStore", "Yuanrong", "RayStore")
"""Names that TransferQueue has for where bytes lie; here they always lie in mapped segments."""


@dataclass(slots=True)
class QueueSettings:
    """How to find or start a queue. `other` are the dotted keys that were given and have no effect."""

    address: dict[str, str] | None = None
    directory: str | None = None
    storage_dir: str | None = None
    units: int = 2
    unit_budget_bytes: int | None = None
    spill_dir: str | None = None
    spill_budget_bytes: int | None = None
    segment_bytes: int = 8 << 20
    fsync: bool = False
    sampler: dict[str, Any] | None = None
    polling: bool = False
    metrics: bool = False
    metrics_port: int = 0
    other: list[str] = field(default_factory=list)

    def service_options(self) -> dict[str, Any]:
        """The arguments of QueueService."""
        return {
            "storage_dir": self.storage_dir,
            "units": self.units,
            "unit_budget_bytes": self.unit_budget_bytes,
            "spill_dir": self.spill_dir,
            "spill_budget_bytes": self.spill_budget_bytes,
            "segment_bytes": self.segment_bytes,
            "fsync": self.fsync,
            "sampler": self.sampler,
            "polling": self.polling,
        }


_TREE = {
    "controller.sampler": "sampler",
    "controller.polling_mode": "polling",
    "metrics.enabled": "metrics",
    "metrics.port": "metrics_port",
    "backend.SimpleStorage.num_data_storage_units": "units",
}
"""Keys of TransferQueue's tree by what they set here."""

_KINDS: dict[str, tuple[type, ...]] = {
    "address": (dict,), "directory": (str,), "storage_dir": (str,), "units": (int,), "unit_budget_bytes": (int,),
    "spill_dir": (str,), "spill_budget_bytes": (int,),
    "segment_bytes": (int,), "fsync": (bool,), "polling": (bool,), "metrics": (bool,), "metrics_port": (int,),
}  # fmt: skip

_OPTIONAL = ("address", "directory", "storage_dir", "unit_budget_bytes", "spill_dir", "spill_budget_bytes", "sampler")

_DIRECTORIES = ("directory", "storage_dir", "spill_dir")

_MAY_BE_ZERO = ("metrics_port", "spill_budget_bytes")


def read_settings(conf: Mapping[str, Any] | None, *, quiet: bool = False) -> QueueSettings:
    """The settings that `conf` (a dict or DictConfig, or None) gives. Raises Invalid for a value that cannot be meant,
    or a key that is nearly one of ours; other unknown keys are tolerated with one warning, unless `quiet`."""
    settings = QueueSettings()
    tree = _plain(conf)
    _refuse_slips([key for key in tree if key not in (*_KINDS, *_BRANCHES, "sampler")], top=True)
    for key, value in sorted(_leaves(tree), key=lambda leaf: leaf[0] not in _TREE):  # ours count more
        name = _TREE.get(key, key)
        if name in _KINDS or name == "sampler":
            _set(settings, name, key, value)
        elif key == "backend.storage_backend":
            _check_backend(value, quiet)
        elif key in _BRANCHES and value is not None:
            raise Invalid(f"init: {key}={value!r}; expected a dict")
        elif key not in _TOLD:
            settings.other.append(key)
    _refuse_slips(settings.other)
    if settings.other and not quiet:
        log.warning("init: these keys have no effect here: %s", ", ".join(settings.other))
    return settings


def differing(given: QueueSettings, have: QueueSettings) -> list[str]:
    """What `given` says otherwise than by default, and not as the queue that is there has it."""
    names = [f.name for f in fields(QueueSettings) if f.name not in ("other", "address")]
    default = QueueSettings()
    return [
        f"{name}={getattr(given, name)!r} (it has {getattr(have, name)!r})"
        for name in names
        if getattr(given, name) not in (getattr(default, name), getattr(have, name))
    ]


def _plain(conf: Any) -> dict[str, Any]:
    if conf is None:
        return {}
    if type(conf).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        conf = OmegaConf.to_container(conf, resolve=True)
    if not isinstance(conf, Mapping):
        raise Invalid(f"init takes a dict or a DictConfig, got {type(conf).__qualname__}")
    return {str(key): value for key, value in conf.items()}


_BRANCHES = ("controller", "backend", "metrics", "backend.SimpleStorage")
"""Keys whose value is a dict."""

_TOLD = ("metrics.endpoint", "metrics.key_file")
"""Keys that `init` adds to what it returns, which may be given to it again."""

_WHOLE = ("address", "controller.sampler", "sampler")
"""Keys whose value may itself be a dict."""


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in _WHOLE:
            found += _leaves(value, f"{name}.")
        else:
            found.append((name, value))
    return found


def _set(settings: QueueSettings, name: str, key: str, value: Any) -> None:
    if value is None:
        if name not in _OPTIONAL:
            raise Invalid(f"init: {key} is None; leave it out for its default, {getattr(settings, name)!r}")
        return
    if name == "sampler":
        settings.sampler = sampler_spec(value)
        return
    if name in _DIRECTORIES and hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if name in _DIRECTORIES:
        _check_path(key, value)
    kinds = _KINDS[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise Invalid(f"init: {key}={value!r}; expected {' or '.join(kind.__name__ for kind in kinds)}")
    if isinstance(value, int) and not isinstance(value, bool) and value < (0 if name in _MAY_BE_ZERO else 1):
        raise Invalid(f"init: {key}={value}; expected a positive number")
    if name == "metrics_port" and value > 65535:
        raise Invalid(f"init: {key}={value}; ports go up to 65535")
    if isinstance(value, dict):
        value = check_address(value, f"init: {key}")
    setattr(settings, name, value)


def _check_path(key: str, path: Any) -> None:
    """Raises Invalid for what can name no directory, whatever is made."""
    if not isinstance(path, str):
        return  # told by its type
    why = None if path else "is empty"
    try:
        os.stat(path or os.curdir)
    except FileNotFoundError:
        pass
    except OSError as error:
        why = f"cannot be a directory ({error.strerror})"
    except ValueError as error:
        why = f"cannot be a directory ({error})"
    if why is not None:
        raise Invalid(f"init: {key}={path[:100]!r} {why}; give the path of a directory, or leave it out")


def _check_backend(value: Any, quiet: bool) -> None:
    if value not in BACKENDS:
        raise Invalid(f"init: backend.storage_backend={value!r}; expected one of {', '.join(BACKENDS)}")
    if value != "SimpleStorage" and not quiet:
        log.warning("init: backend.storage_backend=%s is served by mapped segments, as every backend is here", value)


def _refuse_slips(keys: list[str], *, top: bool = False) -> None:
    """A slip of the pen in a key that matters must not be a key without effect. `top`: keys of the tree's root, whose
    value may be a dict."""
    ours = [f.name for f in fields(QueueSettings) if f.name not in ("other", "metrics", "polling")]
    ours += ["metrics", *_BRANCHES] if top else _TREE
    for key in keys:
        near = [
            name
            for name in difflib.get_close_matches(key, ours, 1, cutoff=0.8)
            if difflib.get_close_matches(key.rpartition(".")[2], [name.rpartition(".")[2]], 1, cutoff=0.8)
        ]  # long branches are alike whatever stands at their ends
        if near:
            raise Invalid(f"init: unknown key {key!r}; did you mean {near[0]!r}?")
