"""vLLM's own extraction: the method ``extract_hidden_states`` and the connector that writes a file for each prompt."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.bench.cases.base import Figures, NotAvailableError, Work
from benchmarks.bench.settings import Settings

__all__ = ["native"]

_PROPOSER = "vllm.v1.spec_decode.extract_hidden_states"


def native(settings: Settings, work: Work) -> Figures:
    """Timed until every file has been written; vLLM does not make them durable."""
    if find_spec(_PROPOSER) is None:
        raise NotAvailableError("this vLLM has no extract_hidden_states")
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams

    ids = [layer + 1 for layer in settings.layers]  # vLLM counts the embedding as 0
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        **settings.engine(),
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(work.folder)},
        },
    }
    with _cannot():
        llm = LLM(model=settings.model, **options)
    load = time.perf_counter() - begun
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> int:
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs: list[Any] = list(llm.generate(asked, sampling, use_tqdm=False))
        return sum(_written(Path(output.kv_transfer_params["hidden_states_path"])) for output in outputs)

    with _cannot():
        generate(work.warmup)
    start = time.perf_counter()
    size = generate(work.prompts)
    seconds = time.perf_counter() - start
    facts = {"bytes": size, "mb_per_second": round(size / 1e6 / seconds, 1)}
    return Figures(settings.tokens, seconds, load, facts, ("files are not made durable",))


@contextlib.contextmanager
def _cannot() -> Iterator[None]:
    """Without a GPU, whatever vLLM says of what it cannot do here; with one it is a failure."""
    import torch

    try:
        yield
    except Exception as error:
        if torch.cuda.is_available():
            raise
        raise NotAvailableError(f"no GPU; {type(error).__name__}: {error}") from error


def _written(path: Path) -> int:
    """The size of a file that is complete: its writer holds a lock until then."""
    with contextlib.suppress(FileNotFoundError), Path(f"{path}.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return path.stat().st_size
