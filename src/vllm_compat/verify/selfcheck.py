"""The proof that needs no second model: the last layer's states give the very tokens that vLLM sampled.

``argmax(lm_head(norm(state)))`` of a token is the token that greedy sampling put after it: after the last one of each
sample, and after each one of an answer. vLLM computed the logits in the dtype of the model, where the largest may not
be unique; a token that rounding can have made the largest agrees, and is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from vllm_compat.convert.norm import FinalNorm
from vllm_compat.types import NORM, LayerId, Tensor
from vllm_compat.verify.head import Head
from vllm_compat.verify.problems import Problem, Problems
from vllm_compat.verify.sample import Checked
from vllm_compat.verify.undo import Sides

__all__ = ["End", "SelfCheck", "SelfCheckResult"]

_AT_ONCE = 256  # states whose logits are computed together
_SIGMAS = 4.0
_LEAST_ROUNDING = 2.0**-20  # of a sum in float32, ours among them
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "half": 2.0**-11, "float32": 2.0**-24, "float": 2.0**-24}


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """What the self-check saw.

    Attributes:
        checked: sampled tokens: one of each sample, or all of each answer.
        exact: of these, those that have the largest logit.
        tied: those that are within rounding of the largest.
        layer_id: whose states were used.
        norm: which kind of norm was applied; ``"none"`` for states that have it behind them.
        head: name of the weight of ``lm_head``.
    """

    checked: int
    exact: int
    tied: int
    layer_id: LayerId
    norm: str
    head: str

    @property
    def agree(self) -> int:
        """Sampled tokens that agree."""
        return self.exact + self.tied


@dataclass(frozen=True, slots=True)
class End:
    """A layer whose last states lead to the logits.

    Attributes:
        layer_id: the model's last layer, or ``"norm"``.
        place: of the layer among the run's.
        number: of the layer among those whose last states are kept.
    """

    layer_id: LayerId
    place: int
    number: int


class _Asked(NamedTuple):
    """A sampled token, and the state before it."""

    sample: Checked
    position: int
    token: int
    state: Tensor


class SelfCheck:
    """Takes the states before sampled tokens at one layer, and compares them a few hundred at a time.

    Attributes:
        end: which states.
        why_not: why nothing can be said of them; empty while something can.
    """

    def __init__(self, head: Head, end: End, dtype: str, problems: Problems, device: str = "cpu") -> None:
        """Begin.

        Args:
            head: the end of the model, its tensors on ``device``.
            end: which states.
            dtype: the engine's; one that vLLM chose is taken for bfloat16.
            problems: gets the samples whose token is another.
            device: where torch computes.
        """
        self._head = head
        self.end = end
        self.why_not = ""
        self._dtype = dtype
        self._problems = problems
        self._device = device
        self._norm: FinalNorm | None = None
        self._rows: list[_Asked] = []
        self._named: set[int] = set()
        self._checked = self._exact = self._tied = 0
        self._sides = Sides(head.norms)

    def add(self, checked: Checked) -> None:
        """One more sample; passed over where there is no state, or vLLM sampled nothing."""
        if not checked.ends or self.why_not:
            return
        states = checked.ends[self.end.number]
        for at, token in enumerate(checked.sampled):
            self._rows.append(_Asked(checked, checked.first + at, token, states[at]))
            if len(self._rows) == _AT_ONCE:
                self._work()

    def finish(self) -> SelfCheckResult:
        """There are no more to come; states on the wrong side of the norm are one problem more."""
        self._work()
        if not self._checked:
            self.why_not = self.why_not or "no sample has both its states and a token that was sampled"
        layer_id = self.end.layer_id
        mix_up = self._sides.find_mix_up(layer_id, self._exact + self._tied)
        if mix_up:
            self._problems.add(Problem(mix_up))
        norm = self._norm.kind if self._norm else "none"
        return SelfCheckResult(self._checked, self._exact, self._tied, layer_id, norm, self._head.name)

    def _work(self) -> None:
        rows, self._rows = self._rows, []
        vocabulary, width = self._head.weight.shape
        found = rows[0].sample.hidden_size if rows else width
        highest = max((row.token for row in rows), default=0)
        if found != width or highest >= vocabulary:
            self.why_not = (
                f"the model is not the run's: it is {width} wide and has {vocabulary} tokens, the states are {found} "
                f"wide, and token {highest} was sampled; give the run's with --model"
            )
            return
        if not rows:
            return
        torch: Any = import_module("torch")
        states = torch.stack([_as_torch(row.state) for row in rows]).float().to(self._device)
        sampled = torch.tensor([row.token for row in rows], device=self._device)
        self._sides.add(states)
        if self.end.layer_id != NORM and self._norm is None:
            self._norm = self._choose(states, sampled)
        normed = self._norm(states) if self._norm else states
        most, best = self._head.best(normed)
        own = self._head.logits(normed, sampled)
        exact = best == sampled
        rounding = max(_rounding(self._dtype), *(_rounding(row.sample.dtype) for row in rows), _LEAST_ROUNDING)
        within = most - own <= rounding * self._slack(normed, most, best, sampled)
        self._checked += len(rows)
        self._exact += int(exact.sum())
        self._tied += int((within & ~exact).sum())
        for at in (~within & ~exact).nonzero().flatten().tolist():
            sample, position, token, _ = rows[at]
            if sample.entry.index in self._named:
                continue  # its first is enough
            self._named.add(sample.entry.index)
            what = (
                f"self-check: by its state of token {position} at layer id {self.end.layer_id} the next token is "
                f"{int(best[at])} (logit {float(most[at]):.4g}), vLLM sampled {token} (logit {float(own[at]):.4g})"
            )
            self._problems.add(Problem(what, sample.entry.index, sample.entry.file, sample.line))

    def _choose(self, states: Tensor, sampled: Tensor) -> FinalNorm:
        """The kind of norm with which most states give the token that was sampled."""
        agree = [int((self._head.best(norm(states))[1] == sampled).sum()) for norm in self._head.norms]
        return self._head.norms[agree.index(max(agree))]

    def _slack(self, normed: Tensor, most: Tensor, best: Tensor, sampled: Tensor) -> Tensor:
        """How far below the largest logit one may be that rounding made the largest, in units of one rounding.

        Both logits are rounded, and so were state and normed state, each of their numbers on its own.
        """
        weight = self._head.weight
        apart = (weight[best].float() - weight[sampled].float()) * normed
        slack = 2 * most.abs() + _SIGMAS * apart.norm(dim=-1)
        return slack if self._head.cap is None else slack * _widening(most, self._head.cap)


def _rounding(dtype: str) -> float:
    """The greatest relative error of one rounding to a dtype; one that is not known is taken for bfloat16."""
    return _ROUNDING.get(dtype, 2.0**-4 if dtype.startswith("float8_e4m3") else 2.0**-8)


def _widening(most: Tensor, cap: float) -> Tensor:
    """What capping adds: three more roundings, two of them where differences are pressed together."""
    pressed = (most / cap).tanh()
    return 2 + 2 * (pressed * cap / most) / (1 - pressed.square())


def _as_torch(state: Tensor) -> Tensor:
    torch: Any = import_module("torch")
    return state if isinstance(state, torch.Tensor) else torch.from_numpy(state)
