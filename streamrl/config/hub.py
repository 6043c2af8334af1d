"""A model named as on the hub, `organisation/name`: found in the local cache, or downloaded because the user named it.

Honours HF_HUB_OFFLINE, HF_HUB_CACHE and HF_TOKEN, as all of Hugging Face's tools do. Nothing else is ever downloaded.
"""

from __future__ import annotations

import re
from pathlib import Path

from streamrl.errors import ConfigError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
"""What a run reads; no pickled weights."""


def is_hub_id(path: str) -> bool:
    """Whether `path` names a model on the hub and no file here."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None and not Path(path).exists()


def cached(name: str) -> str | None:
    """The directory of a model that was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def fetch(name: str) -> str:
    """The directory of a model, downloaded if need be, with a progress bar. Raises ConfigError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if found := cached(name):
        return found
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"model {name!r} is not in the cache {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set; name a directory, "
            "or download it first (hf download)"
        )
    try:
        return snapshot_download(name, allow_patterns=PATTERNS)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {name!r} could not be downloaded: {reason}; name a directory instead") from error
