"""Which folder and weights a model's name stands for: a commit of the hub, or a fingerprint of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_compat.extract.checksum import new_hash

__all__ = ["find_revision", "local_folder"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASHED = ("config.json", "model.safetensors.index.json")


def local_folder(model: str, options: Mapping[str, Any]) -> Path | None:
    """Where a model lies: its own folder, or its snapshot in the hub's cache; None if it is in neither.

    Args:
        model: a folder, or a name on the hub; nothing is fetched.
        options: of the engine; ``revision`` counts.
    """
    folder = Path(model)
    if not folder.is_dir():
        folder = _cached(model) / "snapshots" / (_commit_of_name(model, options) or "unknown")
    return folder if folder.is_dir() else None


def find_revision(model: str, options: Mapping[str, Any]) -> str | None:
    """The commit, or ``xxh3:`` and the digest of what names a folder's weights without reading them; None if unknown.

    Args:
        model: a folder, or a name on the hub; nothing is fetched.
        options: of the engine; ``revision`` counts.
    """
    folder = Path(model)
    if not folder.is_dir():
        return _commit_of_name(model, options)
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots" and (commit := _commit(resolved.name)):
        return commit
    return _fingerprint(folder)


def _commit_of_name(model: str, options: Mapping[str, Any]) -> str | None:
    asked = str(options.get("revision") or "main")
    return _commit(asked) or _commit(_text(_cached(model) / "refs" / asked))


def _fingerprint(folder: Path) -> str | None:
    """Of ``config.json``, the weights' index, the model's own code, and the names and sizes of the weights."""
    hasher = new_hash()
    try:
        weights = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
        code = sorted(path.name for path in folder.glob("*.py"))
        for name in (*_HASHED, *code):
            path = folder / name
            hasher.update(name.encode())
            hasher.update(path.read_bytes() if path.exists() else b"")
    except OSError:
        return None
    hasher.update(repr(weights).encode("utf-8", "backslashreplace"))
    return f"xxh3:{hasher.hexdigest()}"


def _cached(model: str) -> Path:
    """Where the hub's client keeps a model, by its own variables."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _commit(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None
