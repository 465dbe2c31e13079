"""Build vLLM's own EngineCore in this process, or take the caller's; refuse early what cannot be captured."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
from typing import Any

from vllm_compat._adapters.registry import Adapter, named
from vllm_compat._capture.extension import EXTENSION
from vllm_compat._engine.amx import BLOCK_SIZE, lacks_amx
from vllm_compat._engine.cores import Cores
from vllm_compat._engine.lifetime import shut_down, start
from vllm_compat._engine.vllm_engine import VllmEngine
from vllm_compat._layers import check_layer_ids
from vllm_compat.detection import detect
from vllm_compat.errors import AttachError, UnsupportedModelError, UsageError
from vllm_compat.types import LayerId

__all__ = ["build", "wrap"]

logger = logging.getLogger(__name__)

_ALWAYS = {"enforce_eager": True, "async_scheduling": False, "skip_tokenizer_init": True}
_WHILE_CAPTURING = {"enable_prefix_caching": False, "worker_extension_cls": EXTENSION}


def build(
    model: str, layer_ids: tuple[LayerId, ...], options: dict[str, Any], shared_states_bytes: int = 0
) -> VllmEngine:
    """``open_engine``."""
    found = detect()
    adapter = found.require_adapter()
    from vllm.engine.arg_utils import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)}
    for name in options:
        if name not in known or name == "model":
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"engine option {name!r} is not a field of this vLLM's EngineArgs.{hint}")
    defaults = _ALWAYS | (_WHILE_CAPTURING if layer_ids else {})
    arguments = {name: value for name, value in defaults.items() if name in known} | options
    if arguments.get("async_scheduling"):
        raise UsageError("async_scheduling=True: run_step() runs one step at a time; leave it off")
    if layer_ids:
        _refuse_options(arguments)
        if arguments.get("enable_prefix_caching"):
            named("request", adapter.chosen["request"][0]).require_cache_salt()
    try:
        config = EngineArgs(model=model, **arguments).create_engine_config()
        if "block_size" not in options and lacks_amx(found, config):
            logger.info("block_size=%d: this CPU build has no other kernels for this processor", BLOCK_SIZE)
            config = EngineArgs(model=model, **arguments, block_size=BLOCK_SIZE).create_engine_config()
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"vLLM refuses the model {model!r} or these options, {arguments}: {error}") from error
    if config.model_config.is_multimodal_model and "skip_tokenizer_init" not in options:
        # Wrappers such as Kimi-K2.5's build their processor from the tokenizer, even for prompts of token ids alone.
        config.model_config.skip_tokenizer_init = False
    if layer_ids:
        shares = bool(arguments.get("enable_prefix_caching"))
        layer_ids = _checked_for_capture(config, layer_ids, UsageError, shares=shares)

    cores = Cores()
    core = cores.opened(lambda: start(config))
    try:
        caches = config.cache_config.enable_prefix_caching
        return _engine(
            adapter,
            core,
            core.scheduler,
            core.model_executor,
            layer_ids,
            owned=True,
            shared_states_bytes=shared_states_bytes if caches else 0,
            cores=cores,
        )
    except BaseException:
        shut_down([core])
        raise


def wrap(core: Any, scheduler: Any, executor: Any, layer_ids: tuple[LayerId, ...]) -> VllmEngine:
    """``attach``."""
    if (core is None) == (scheduler is None and executor is None):
        raise AttachError("attach() takes either an EngineCore, or both scheduler= and executor=")
    if core is not None:
        core = getattr(core, "engine_core", core)  # the in-process client of LLM holds its EngineCore under this name
        scheduler, executor = core.scheduler, core.model_executor
    if scheduler is None or executor is None:
        raise AttachError(f"attach() wants both scheduler= and executor=, found {scheduler!r} and {executor!r}")
    config = scheduler.vllm_config
    if getattr(config.scheduler_config, "async_scheduling", False):
        raise AttachError("the engine was built with async_scheduling; run_step() wants async_scheduling=False")
    if layer_ids:
        layer_ids = _checked_for_capture(config, layer_ids, AttachError)
    return _engine(detect().require_adapter(), core, scheduler, executor, layer_ids, owned=False)


def _engine(
    adapter: Adapter,
    core: Any,
    scheduler: Any,
    executor: Any,
    layer_ids: tuple[LayerId, ...],
    *,
    owned: bool,
    shared_states_bytes: int = 0,
    cores: Cores | None = None,
) -> VllmEngine:
    return VllmEngine(
        adapter=adapter,
        core=core,
        scheduler=scheduler,
        executor=executor,
        layer_ids=layer_ids,
        shut_down=functools.partial(shut_down, [core]) if owned else None,
        shared_states_bytes=shared_states_bytes,
        cores=cores,
    )


def _refuse_options(arguments: dict[str, Any]) -> None:
    """Options whose names already say that no state, or not every row, could be captured."""
    if not arguments.get("enforce_eager"):
        raise UsageError(
            "enforce_eager=False: a tap on a compiled model captures nothing and says nothing. Capturing runs eager, "
            "which costs 0.8% of prefill speed (8B, one H200)."
        )
    if arguments.get("speculative_config"):
        raise UsageError("speculative_config: rows of rejected drafts would be captured; capture with the plain model")


def _checked_for_capture(
    config: Any, layer_ids: tuple[LayerId, ...], error: type[UsageError], *, shares: bool = False
) -> tuple[LayerId, ...]:
    """The layer ids, if this configuration can be captured at all."""
    model, parallel = config.model_config, config.parallel_config
    if getattr(model, "is_encoder_decoder", False) or model.runner_type != "generate":
        raise UnsupportedModelError(f"{model.model}: only decoder-only, generating models can be captured")
    if config.cache_config.enable_prefix_caching and not shares:
        raise error(
            "prefix caching is on: cached tokens are not forwarded and have no states. Build the engine with "
            "enable_prefix_caching=False"
        )
    if not model.enforce_eager:
        raise error("the model is compiled, and a tap on it captures nothing. Build the engine with enforce_eager=True")
    if config.speculative_config is not None:
        raise error(
            "the engine speculates: rows of rejected drafts would be captured. Build it without speculative_config"
        )
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise error(f"{name}={getattr(parallel, name)}: capturing is for {name}=1 (use tensor_parallel_size)")
    return check_layer_ids(layer_ids, model.hf_text_config.num_hidden_layers)
