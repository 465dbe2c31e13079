"""Each entry of some samples against every state of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_compat.errors import UsageError
from vllm_compat.extract.model import read_model_facts
from vllm_compat.identify.files import ForeignFileError, ForeignSample, choose_files, read_sample
from vllm_compat.types import Tensor
from vllm_compat.verify.compare import ALLOWED, Errors, apart, errors
from vllm_compat.verify.reference import Name, Reference, load_reference

__all__ = ["Entry", "Found", "identify"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the samples.

    Attributes:
        name: as the file has it, ``hidden_states[3]``.
        holds: the state of the model that it is in every sample: a layer id, ``"norm"`` or ``"embed"``; None where
            it is none, or not the same one in all.
        error: its typical error against that state; against the nearest one where there is none.
        bound: what that may be, ``ALLOWED`` times what HF's own bfloat16 has.
        nearest: the nearest state, after the one that it is.
        nearest_error: its error against that.
        by_sample: what it is in each sample, in their order.
    """

    name: str
    holds: Name | None
    error: float
    bound: float
    nearest: Name
    nearest_error: float
    by_sample: tuple[Name | None, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What some files hold.

    Attributes:
        entries: one for each tensor, in the order of the files.
        samples: the files that were computed again.
        num_files: how many there are.
        num_layers: decoder layers of the model.
    """

    entries: tuple[Entry, ...]
    samples: tuple[Path, ...]
    num_files: int
    num_layers: int

    @property
    def layer_ids(self) -> tuple[Name | None, ...]:
        """What the entries hold."""
        return tuple(entry.holds for entry in self.entries)


def identify(
    folder: Path, model: str, *, samples: int = 4, seed: int = 0, device: str = "cpu", trust_remote_code: bool = False
) -> Found:
    """Compute some samples again and say what their entries are.

    Args:
        folder: of the files, or of folders of them.
        model: a folder, or a name of the hub that is in the local cache.
        samples: how many are taken, at random.
        seed: of the choice.
        device: where torch computes.
        trust_remote_code: let the model bring its own code.

    Raises:
        UsageError: no samples in the folder, or a model of unknown width.
        ForeignFileError: a file that is no sample, or is of other entries than the others.
        NoReferenceError: HF transformers cannot compute the model.
    """
    hidden_size = read_model_facts(model).hidden_size
    if hidden_size is None:
        raise UsageError(f"{model}: its config.json with a hidden_size is wanted on this machine")
    paths, num_files = choose_files(folder, samples, seed)
    chosen = [read_sample(path, hidden_size) for path in paths]
    names = list(chosen[0].entries)
    for sample in chosen:
        if list(sample.entries) != names:
            words = f"it has the entries {', '.join(sample.entries)}, others {', '.join(names)}"
            raise ForeignFileError(words, path=str(sample.path))

    def load(dtype: str) -> Reference:
        return load_reference(model, dtype, device=device, trust_remote_code=trust_remote_code)

    references = _references(chosen, load)
    return Found(
        entries=tuple(_entry(name, chosen, references) for name in names),
        samples=tuple(paths),
        num_files=num_files,
        num_layers=len(references[0].exact) - 2,
    )


@dataclass(frozen=True, slots=True)
class _Computed:
    """A sample computed again: every state in float32, and how far HF's own bfloat16 is from it."""

    exact: Mapping[Name, Tensor]
    noise: Mapping[Name, Errors]


def _references(samples: Sequence[ForeignSample], load: Callable[[str], Reference]) -> list[_Computed]:
    """One model in memory at a time."""
    reference = load("float32")
    exact = [reference.states(sample.token_ids) for sample in samples]
    del reference
    reference = load("bfloat16")
    return [
        _Computed(own, {k: errors(apart(state, own[k])) for k, state in reference.states(sample.token_ids).items()})
        for sample, own in zip(samples, exact, strict=True)
    ]


def _entry(name: str, samples: Sequence[ForeignSample], references: Sequence[_Computed]) -> Entry:
    found: list[dict[Name, Errors]] = [
        {k: errors(apart(sample.entries[name], own)) for k, own in computed.exact.items()}
        for sample, computed in zip(samples, references, strict=True)
    ]
    fits: list[Name | None] = [_best(own, computed.noise) for own, computed in zip(found, references, strict=True)]
    holds = fits[0] if len(set(fits)) == 1 else None
    worst: dict[Name, float] = {k: max(own[k].typical for own in found) for k in found[0]}
    first, second, *_ = _nearest_first(worst, lambda k: worst[k])
    what: Name = first if holds is None else holds
    nearest = second if what == first else first
    bound = max(ALLOWED * computed.noise[what].typical for computed in references)
    return Entry(name, holds, worst[what], bound, nearest, worst[nearest], tuple(fits))


def _best(found: Mapping[Name, Errors], noise: Mapping[Name, Errors]) -> Name | None:
    """The state within whose bounds a tensor is; the nearest of several."""
    fitting: list[Name] = [k for k in found if found[k].within(ALLOWED * noise[k].typical, ALLOWED * noise[k].median)]
    return _nearest_first(fitting, lambda k: found[k].typical)[0] if fitting else None


def _nearest_first(names: Iterable[Name], distance: Callable[[Name], float]) -> list[Name]:
    """Sorted by distance; one that is not a number (of an embedding of zeros) is the farthest."""

    def key(name: Name) -> float:
        found = distance(name)
        return math.inf if math.isnan(found) else found

    return sorted(names, key=key)
