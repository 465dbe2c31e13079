"""What one benchmark is asked to do, and how its turns are told."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The same for every case; each turn's process reads it from a file.

    Attributes:
        model: a folder.
        prompts: how many are timed.
        length: tokens of each.
        warmup: prompts, others, that each process runs before it looks at the clock.
        layers: decoder layers whose states are wanted, from 0, rising.
        max_num_seqs: the most requests that are under way at once.
        max_num_batched_tokens: the most tokens of one step.
        kv_cache_gib: of the KV cache on a CPU.
        engine_options: more fields of vLLM's EngineArgs, for every case that takes them.
    """

    model: str
    prompts: int
    length: int
    warmup: int
    layers: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_gib: int
    engine_options: dict[str, Any]

    @property
    def tokens(self) -> int:
        """All that are timed."""
        return self.prompts * self.length

    def engine(self) -> dict[str, Any]:
        """What every engine is built with; the dtype is the model's own."""
        return {
            "max_model_len": self.length + 1,  # the token sampled after a prompt needs a place
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": False,
            **self.engine_options,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Settings:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Settings(**{**found, "layers": tuple(found["layers"])})
