"""How far a run's states are from the reference's, layer by layer, and what wrong ones are instead.

Errors are each token's own, relative to its state. The error over all tokens together would mislead: the first token's
state is hundreds of times greater than the others' in the middle layers of a trained model, so that figure is nearly
its alone, one draw of rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vllm_compat.types import NORM, LayerId, Tensor
from vllm_compat.verify.reference import EMBED, Name, NoReferenceError, Reference, order

__all__ = ["ALLOWED", "FLOAT32_BOUND", "Errors", "LayerResult", "Recomputed", "Taken", "apart", "compare", "errors"]

ALLOWED = 2.0
FLOAT32_BOUND = 1e-5


@dataclass(frozen=True, slots=True)
class Taken:
    """A sample that is computed again.

    Attributes:
        index: its number.
        token_ids: its tokens.
        states: [tokens, layers, hidden_size], as its file has them.
    """

    index: int
    token_ids: tuple[int, ...]
    states: Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Errors:
    """How far states are from a reference, in relative L2 errors of the tokens, ``|a - b| / |b|``.

    Attributes:
        typical: their root mean square.
        median: their median.
        worst: the greatest.
        worst_at: which token has it, counted over all samples.
    """

    typical: float
    median: float
    worst: float
    worst_at: int

    def within(self, typical: float, median: float) -> bool:
        """Whether both figures are at most those given; False where one is not a number."""
        return self.typical <= typical and self.median <= median


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One layer of the run.

    Attributes:
        layer_id: what the run calls it.
        ours: the run's states against the reference in float32.
        noise: the reference's own in bfloat16, kept as the run keeps its states.
        bound: what ``ours.typical`` may be.
        ok: whether it is within its bound.
        nearest: the other state of the model that is nearest to the run's.
        nearest_error: the run's states against that, typical.
        looks_like: other states of the model as which the run's would be within bounds, the nearest first.
    """

    layer_id: LayerId
    ours: Errors
    noise: Errors
    bound: float
    ok: bool
    nearest: Name
    nearest_error: float
    looks_like: tuple[Name, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """The comparison.

    Attributes:
        layers: one result for each layer of the run, in its order.
        samples: the samples' indices.
        lengths: their tokens.
        cosines: [layers, tokens of all samples], between the run's states and the reference's.
        num_layers: decoder layers of the model.
    """

    layers: tuple[LayerResult, ...]
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    cosines: Tensor = field(repr=False)
    num_layers: int

    def place(self, token: int) -> tuple[int, int]:
        """Sample and position of a token that is counted over all samples."""
        for index, length in zip(self.samples, self.lengths, strict=True):
            if token < length:
                return index, token
            token -= length
        raise IndexError(token)

    def diagnose(self, result: LayerResult) -> str:
        """What a layer that is out of bounds is instead, in words; empty for one that is not."""
        k, found = result.layer_id, result.looks_like
        last = self.num_layers - 1
        if result.ok:
            return ""
        if not found:
            return f"layer {k} matches no layer of the model; the nearest is {result.nearest}"
        if (k, found[0]) == (last, NORM):
            return "the last entry is post-norm, the run says pre-norm"
        if (k, found[0]) == (NORM, last):
            return "the last entry is pre-norm, the run says post-norm"
        if found[0] == EMBED:
            return f"layer {k} matches the embeddings, which enter layer 0"
        return f"layer {k} matches layer {found[0]}"


def compare(
    layer_ids: Sequence[LayerId],
    samples: Sequence[Taken],
    load: Callable[[str], Reference],
    *,
    bound: float | None,
    stored: Callable[[Tensor], Tensor] = lambda states: states,
) -> Recomputed:
    """Compute samples again, in float32 and in bfloat16, one model in memory at a time.

    Args:
        layer_ids: of the run.
        samples: at least one.
        load: loads the reference in a dtype.
        bound: what the typical error may be; None for ``ALLOWED`` times the reference's own noise in bfloat16.
        stored: what saving does to a state, as in float8.

    Raises:
        NoReferenceError: the model cannot be computed, or is of another shape.
    """
    reference = load("float32")
    torch: Any = import_module("torch")  # which is there if that went well
    num_layers = reference.num_layers
    names = order(num_layers)
    exact = [reference.states(sample.token_ids) for sample in samples]
    _check_shapes(layer_ids, samples, exact)
    ours = [_all_apart(samples, exact, at, names) for at in range(len(layer_ids))]
    cosines = torch.stack([_cosines(samples, exact, at, k) for at, k in enumerate(layer_ids)])
    del reference  # before the next is loaded
    reference = load("bfloat16")
    parts: dict[Name, list[Tensor]] = {name: [] for name in names}
    for sample, own in zip(samples, exact, strict=True):
        for name, state in reference.states(sample.token_ids).items():
            parts[name].append(apart(stored(state), own[name]))
    noise: dict[Name, Errors] = {name: errors(torch.cat(found)) for name, found in parts.items()}
    return Recomputed(
        layers=tuple(_result(k, found, noise, bound) for k, found in zip(layer_ids, ours, strict=True)),
        samples=tuple(sample.index for sample in samples),
        lengths=tuple(len(sample.token_ids) for sample in samples),
        cosines=cosines,
        num_layers=num_layers,
    )


def _check_shapes(
    layer_ids: Sequence[LayerId], samples: Sequence[Taken], exact: Sequence[Mapping[Name, Tensor]]
) -> None:
    missing = [k for k in layer_ids if k not in exact[0]]
    if missing:
        raise NoReferenceError(f"the model has no layer {missing[0]}, only 0 to {len(exact[0]) - 3}: another model?")
    width, wanted = exact[0][EMBED].shape[1], samples[0].states.shape[2]
    if width != wanted:
        raise NoReferenceError(f"the model's states are {width} wide, the run's {wanted}: another model?")


def _all_apart(
    samples: Sequence[Taken], exact: Sequence[Mapping[Name, Tensor]], at: int, names: Sequence[Name]
) -> dict[Name, Errors]:
    """The errors of one layer of the run against each state of the model."""
    torch: Any = import_module("torch")
    found: dict[Name, Errors] = {}
    for name in names:
        pairs = zip(samples, exact, strict=True)
        found[name] = errors(torch.cat([apart(_layer(sample, at), own[name]) for sample, own in pairs]))
    return found


def _cosines(samples: Sequence[Taken], exact: Sequence[Mapping[Name, Tensor]], at: int, name: Name) -> Tensor:
    torch: Any = import_module("torch")
    cosine = torch.nn.functional.cosine_similarity
    pairs = zip(samples, exact, strict=True)
    return torch.cat([cosine(_layer(sample, at).double(), own[name].double(), dim=1) for sample, own in pairs]).float()


def _layer(sample: Taken, at: int) -> Tensor:
    torch: Any = import_module("torch")
    states = sample.states[:, at]
    return (states if isinstance(states, torch.Tensor) else torch.from_numpy(states)).float()


def apart(states: Tensor, reference: Tensor) -> Tensor:
    """Each token's relative L2 error, [tokens]."""
    return (states.float() - reference).norm(dim=1) / reference.norm(dim=1)


def errors(distances: Tensor) -> Errors:
    """The figures of some tokens' errors, [tokens]."""
    worst, at = distances.max(0)
    typical = float(distances.double().square().mean().sqrt())
    return Errors(typical, float(distances.median()), float(worst), int(at))


def _result(
    layer_id: LayerId, ours: Mapping[Name, Errors], noise: Mapping[Name, Errors], bound: float | None
) -> LayerResult:
    def fits(name: Name) -> bool:
        if bound is not None:
            return ours[name].within(bound, bound)
        return ours[name].within(ALLOWED * noise[name].typical, ALLOWED * noise[name].median)

    def distance(name: Name) -> float:
        found = ours[name].typical
        return math.inf if math.isnan(found) else found  # an embedding of zeros

    names: list[Name] = [name for name in ours if name != layer_id]
    others = sorted(names, key=distance)
    return LayerResult(
        layer_id=layer_id,
        ours=ours[layer_id],
        noise=noise[layer_id],
        bound=ALLOWED * noise[layer_id].typical if bound is None else bound,
        ok=fits(layer_id),
        nearest=others[0],
        nearest_error=ours[others[0]].typical,
        looks_like=tuple(name for name in others if fits(name)),
    )
