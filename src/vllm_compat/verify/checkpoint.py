"""A model's folder: its configuration, and single tensors of its weights in safetensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from vllm_compat.types import Tensor

__all__ = ["Checkpoint", "CheckpointError", "find_folder"]

_INDEX = "model.safetensors.index.json"


class CheckpointError(Exception):
    """Weights that are not there, or not as they are needed; never more than a reason to leave something out."""


class Checkpoint:
    """The weights of a model, none of them read before it is asked for.

    Attributes:
        folder: the model's folder.
        config: ``config.json``, the text model's own settings on top.
        names: of the tensors.
    """

    def __init__(self, folder: Path) -> None:
        """Read the configuration, and which tensors there are.

        Raises:
            CheckpointError: there is nothing that can be read.
        """
        self.folder = folder
        try:
            whole: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            own = whole.get("text_config")
            self.config: Mapping[str, Any] = whole | own if isinstance(own, dict) else whole
            self._files = self._find_files()
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{folder} has no configuration and index that can be read: {error!r}") from error
        if not self._files:
            raise CheckpointError(f"{folder} has no weights in safetensors")
        self.names = tuple(self._files)

    def number(self, *names: str) -> int | float | None:
        """The first of these settings that is a number."""
        values = (self.config.get(name) for name in names)
        return next((value for value in values if type(value) in (int, float)), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor of torch's in a floating dtype.

        Raises:
            CheckpointError: the file cannot be read, or the tensor is quantised.
        """
        torch: Any = import_module("torch")
        with self._open(name) as file:
            found = file.get_tensor(name)
        if found.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise CheckpointError(f"{name} is {found.dtype}, which is quantised")
        return found

    def _find_files(self) -> dict[str, str]:
        """Name of a tensor -> name of its file."""
        if (self.folder / _INDEX).exists():
            places = json.loads((self.folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {name: Path(str(file)).name for name, file in places.items()}
        found = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > 100_000_000:  # what safetensors itself takes at most
                    raise ValueError(f"{path.name} is no safetensors file")
                header = cast("dict[str, Any]", json.loads(file.read(size)))
            found.update({name: path.name for name in header if name != "__metadata__"})
        return found

    @contextlib.contextmanager
    def _open(self, name: str) -> Generator[Any, None, None]:
        try:
            library: Any = import_module("safetensors")
            import_module("torch")
        except ImportError as error:
            raise CheckpointError(f"the weights are read with torch and safetensors: {error}") from error
        path = self.folder / self._files[name]
        try:
            with library.safe_open(str(path), framework="pt") as file:
                yield file
        except (OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error


def find_folder(model: str, revision: str | None) -> Path:
    """The folder of a model: itself, or the hub's snapshot on this machine; nothing is downloaded.

    Args:
        model: a folder, or a name on the hub.
        revision: the commit; None or a fingerprint of ours for the main one.

    Raises:
        CheckpointError: it is not on this machine.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    commit = None if revision is None or ":" in revision else revision
    try:
        hub: Any = import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, revision=commit, local_files_only=True))
    except Exception as error:  # of many kinds, some of them ValueErrors on what is no name
        raise CheckpointError(f"{model} is no folder, and no snapshot of the hub on this machine") from error
