"""Which tokenizer makes tokens of a row, and a fingerprint of its files: what it makes is not to change on the way."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_compat.extract.checksum import new_hash
from vllm_compat.extract.revision import local_folder

__all__ = ["TokenizerSource"]

_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py", "*/*.jinja")
_PACKAGES = ("transformers", "tokenizers", "jinja2")
_PART = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer by its name.

    Attributes:
        name: a folder, or a name on the hub.
        revision: of the name; None for the default.
        date: what a chat template is told of today, as ``2026-01-31``: the same as long as a run goes on.
        fingerprint: of its files and of the packages that read them; None where they are not on this machine.
        trust_remote_code: let it bring its own code; it is nobody's to remember.
    """

    name: str
    revision: str | None
    date: str
    fingerprint: str | None
    trust_remote_code: bool = field(default=False, compare=False)

    @classmethod
    def of_engine(
        cls, model: str, options: Mapping[str, Any], *, trust_remote_code: bool = False, date: str | None = None
    ) -> TokenizerSource:
        """The one that an engine would use.

        Args:
            model: the engine's.
            options: of the engine; ``tokenizer``, ``tokenizer_revision`` and ``revision`` count.
            trust_remote_code: let it bring its own code.
            date: of the run that goes on; None for today.
        """
        name = str(options.get("tokenizer") or model)
        revision = options.get("tokenizer_revision") or (options.get("revision") if name == model else None)
        return cls(
            name=name,
            revision=None if revision is None else str(revision),
            date=date or datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            fingerprint=_fingerprint(name, revision),
            trust_remote_code=trust_remote_code,
        )

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], *, trust_remote_code: bool = False) -> TokenizerSource | None:
        """The one of a record; None where its files are not what they were, or cannot be told to be.

        Raises:
            KeyError, TypeError: the record says nothing of the kind.
        """
        fingerprint = _fingerprint(found["name"], found["revision"])
        if fingerprint is None or fingerprint != found["fingerprint"]:
            return None
        return cls(**found, trust_remote_code=trust_remote_code)

    def as_dict(self) -> dict[str, Any]:
        """What a record has of it."""
        return {
            "name": self.name,
            "revision": self.revision,
            "date": self.date,
            "fingerprint": self.fingerprint,
        }


def _fingerprint(name: str, revision: object) -> str | None:
    folder = local_folder(name, {"revision": revision})
    if folder is None:
        return None
    hasher = new_hash()
    hasher.update(repr([(package, _version(package)) for package in _PACKAGES]).encode())
    try:
        for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
            hasher.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode("utf-8", "backslashreplace"))
            with path.open("rb") as file:
                while part := file.read(_PART):
                    hasher.update(part)
    except OSError:
        return None
    return hasher.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
