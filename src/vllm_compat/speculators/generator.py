"""speculators' generator of hidden states, as releases 0.3.0 to 0.4.0.1 had it, on an engine of ours."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_compat.engine import Engine, open_engine
from vllm_compat.errors import CaptureError, UsageError
from vllm_compat.extract.model import read_model_facts
from vllm_compat.speculators.final_state import FinalState, captured_ids, installed_final_state
from vllm_compat.types import CapturedStates, Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["VllmHiddenStatesGenerator"]

logger = logging.getLogger(__name__)

_LEAST_BUDGET = 8192  # tokens of a step, as speculators had it


class VllmHiddenStatesGenerator:
    """Token ids in, the states of some decoder layers out; the constructor and ``generate`` are those of speculators.

    What is different is what was wrong: results come in the order of the prompts however many they are, a prompt longer
    than the token budget is whole, a call may hold any number of prompts, and each layer's states lie where
    ``layer_ids`` has the layer.

    Args:
        model_path: a folder or a name that vLLM accepts. As in speculators the model may bring its own code, which is
            run: give it only models that you trust.
        layer_ids: decoder layers from 0, whose outputs are wanted, in this order. Default: 2, n // 2, n - 3, n - 1 of n
            layers.
        max_model_len: longer prompts are cut to one token less, which is said in the log.
        gpu_memory_utilization: share of a GPU's memory for the model and its KV cache.
        tensor_parallel_size: GPUs to split each layer over.
        max_num_batched_tokens: the most tokens of one step; 8192, or ``max_model_len`` if that is more.
        final_state: what the last entry is where it is the model's last layer: ``"pre-norm"``, the output of the layer,
            or ``"post-norm"``, after the final norm. Default: what the trainer of the installed speculators takes,
            which is post-norm for 0.3.0 alone; pre-norm where none is installed.
        **engine_options: more arguments of ``vllm_compat.open_engine``.

    Raises:
        UsageError: a ``ValueError``: a layer that the model has not, or an option that cannot be. Nothing was loaded.
        UnsupportedVllmError: nothing serves the installed vLLM.
        UnsupportedModelError: the model's layers could not be found.
    """

    def __init__(
        self,
        model_path: str,
        layer_ids: list[int] | None = None,
        max_model_len: int = 2048,
        gpu_memory_utilization: float = 0.8,
        tensor_parallel_size: int = 1,
        max_num_batched_tokens: int | None = None,
        *,
        final_state: FinalState | None = None,
        **engine_options: Any,
    ) -> None:
        self.model_path = model_path
        self.tensor_parallel_size = tensor_parallel_size
        num_layers = _num_layers(model_path)
        self.layer_ids = _checked(layer_ids, num_layers)
        self.final_state, why = (final_state, "asked for") if final_state else installed_final_state()
        self._wanted = captured_ids(self.layer_ids, num_layers, self.final_state)
        logger.info("layers %s of %d, the last one %s (%s)", self.layer_ids, num_layers, self.final_state, why)
        # The two facts of it that speculators' own DataGenerationConfig and scripts read.
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(gpu_memory_utilization=gpu_memory_utilization),
            model_config=SimpleNamespace(model=model_path, max_model_len=max_model_len),
        )
        self._tokenizer: Any = None
        self._calls = itertools.count()
        self._engine: Engine = open_engine(
            model_path,
            layer_ids=tuple(dict.fromkeys(self._wanted)),
            tensor_parallel_size=tensor_parallel_size,
            **{
                "max_model_len": max_model_len,
                "gpu_memory_utilization": gpu_memory_utilization,
                "max_num_batched_tokens": max_num_batched_tokens or max(_LEAST_BUDGET, max_model_len),
                "trust_remote_code": True,
                **engine_options,
            },
        )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when it is first asked for."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=True)
        return self._tokenizer

    def generate(self, token_ids: Sequence[Sequence[int]] | Tensor) -> list[dict[str, Any]]:
        """The states of each prompt.

        Args:
            token_ids: any number of prompts: lists, or tensors of one dimension, or one tensor of two.

        Returns:
            A dictionary for each prompt, in their order: ``input_ids``, int64 [tokens]; ``hidden_states``, a tensor
            [tokens, hidden_size] on the CPU in the model's dtype for each of ``layer_ids``, none a view of another;
            ``loss_mask``, None.

        Raises:
            RequestError: a ``ValueError``: a prompt that is empty or has a token that the model has not. Nothing was
                computed.
            UsageError: no prompts at all.
            StepError, CaptureError: vLLM failed, or rows were not what they should be; the generator is closed.
        """
        prompts = [_as_list(ids) for ids in token_ids]
        if not prompts:
            raise UsageError("token_ids cannot be empty: give at least one prompt")
        call = next(self._calls)
        by_id = {f"{call}-{n}": ids for n, ids in enumerate(self._cut(prompts))}
        states = self._run(by_id)
        return [self._result(ids, states[request_id]) for request_id, ids in by_id.items()]

    def close(self) -> None:
        """End the engine. Also done at the end of a ``with`` block, and when the generator is no longer used."""
        engine: Engine | None = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if sys.is_finalizing():  # vLLM's own modules are half gone by then; its workers end with this process
            return
        try:
            self.close()
        except Exception as error:  # nobody is there to catch it
            logger.warning("the engine did not end cleanly: %s: %s", type(error).__name__, error)

    def _cut(self, prompts: list[list[int]]) -> list[list[int]]:
        most = self._engine.max_model_len - 1  # the token sampled after a prompt needs a place
        too_long = sum(len(ids) > most for ids in prompts)
        if too_long:
            logger.warning("%d of %d prompts are cut to their first %d tokens", too_long, len(prompts), most)
        return [ids[:most] for ids in prompts]

    def _run(self, prompts: dict[str, list[int]]) -> dict[str, CapturedStates]:
        """Each prompt's states by request id; whatever ends a call, nothing of it is left to the next."""
        engine = self._engine
        found: dict[str, CapturedStates] = {}
        try:
            for request_id, ids in prompts.items():
                engine.make_request(ids, request_id=request_id)
            while engine.has_unfinished:
                engine.run_step()
                self._collect(prompts, found)
            self._collect(prompts, found)
            if missing := [request_id for request_id in prompts if request_id not in found]:
                what = f"no states came for {len(missing)} of {len(prompts)} prompts, the first {missing[0]!r}"
                raise CaptureError(what)
        except CaptureError:
            self.close()  # what it would give next is no more to be trusted
            raise
        except BaseException:
            if not engine.closed:
                engine.abort(*prompts)
                engine.get_captured_states()
            raise
        return found

    def _collect(self, prompts: dict[str, list[int]], found: dict[str, CapturedStates]) -> None:
        for states in self._engine.get_captured_states():
            if states.token_ids != tuple(prompts[states.request_id]):
                raise CaptureError(f"the states of prompt {states.request_id!r} are of other tokens")
            found[states.request_id] = states

    def _result(self, ids: list[int], states: CapturedStates) -> dict[str, Any]:
        import torch

        return {
            "input_ids": torch.tensor(ids, dtype=torch.long),
            # Copies: the layers of one request share their memory, all of which torch.save would write for each.
            "hidden_states": [states[wanted].clone(memory_format=torch.contiguous_format) for wanted in self._wanted],
            "loss_mask": None,
        }


def _as_list(token_ids: Sequence[int] | Tensor) -> list[int]:
    to_list = getattr(token_ids, "tolist", None)
    found: list[int] = to_list() if to_list else list(token_ids)
    return found


def _checked(layer_ids: Sequence[int] | None, num_layers: int) -> list[int]:
    if layer_ids is None:
        return [2, num_layers // 2, num_layers - 3, num_layers - 1]
    if not layer_ids:
        raise UsageError("layer_ids cannot be empty: give at least one layer, or None for the default")
    for layer_id in layer_ids:
        if type(layer_id) is not int or not 0 <= layer_id < num_layers:
            raise UsageError(
                f"layer id {layer_id!r} is out of bounds: the model has {num_layers} layers, 0 to {num_layers - 1}"
            )
    return list(layer_ids)


def _num_layers(model_path: str) -> int:
    """Of a local folder without transformers; of a name on the hub with it."""
    facts = read_model_facts(model_path)
    if facts.num_layers is not None:
        return facts.num_layers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=True).get_text_config()
    found: int = config.num_hidden_layers
    return found
