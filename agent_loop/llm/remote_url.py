"""The address of a model that somebody else serves."""

from __future__ import annotations

from urllib.parse import urlsplit


def remote_url(url: str) -> str:
    """`url` without a slash at its end. Raises ValueError for one that cannot be asked, with words that follow the name
    of what held it; none of them is a password."""
    if "@" in url:
        raise ValueError("holds a user or a password; give a key by key_env or key_file")
    if "?" in url or "#" in url:
        raise ValueError("has a query or a fragment, and paths are put after it; give a key by key_env or key_file")
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"is {url!r}; expected https://host/v1, or http://host:port/v1")
    return url.rstrip("/")
