"""How a Request is made, and where its block hasher comes from."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from vllm_compat._adapters.base import Behaviour
from vllm_compat._detect.need import Need
from vllm_compat.errors import UnsupportedVllmError

__all__ = ["BEHAVIOURS", "BySignature", "RequestFactory"]

# Required by some releases and never of use here: None is what vLLM's own front end passes for plain text.
_NEVER_USED = ("pooling_params", "eos_token_id", "multi_modal_kwargs", "multi_modal_hashes", "multi_modal_placeholders")


class RequestFactory(Behaviour):
    """How a Request is made."""

    variation = "request"

    @abstractmethod
    def make(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling_params: Any,
        block_hasher: Any,
        cache_salt: str | None = None,
    ) -> Any:
        """vLLM's own ``Request``; it shares cached blocks with those of the same salt alone."""

    @abstractmethod
    def require_cache_salt(self) -> None:
        """Raise unless requests take a salt.

        Raises:
            UnsupportedVllmError: they do not.
        """

    @abstractmethod
    def block_hasher(self, core: Any, scheduler: Any) -> Any:
        """The engine's own hasher, one of the same kind, or None where the engine needs none."""


class BySignature(RequestFactory):
    """Pass, by keyword, those of our arguments that this release's constructor has.

    The arguments moved in 11 of the 24 minor releases since 0.10; the end of a request is told by
    ``SamplingParams.stop_token_ids`` because ``eos_token_id`` left the constructor at 0.17.
    """

    name = "by-signature"
    needs: ClassVar = (
        Need(
            "vllm.v1.request:Request.__init__",
            ("request_id", "prompt_token_ids", "sampling_params", "block_hasher"),
            frozenset({"request_id", "prompt_token_ids", "sampling_params", "block_hasher", *_NEVER_USED}),
        ),
        Need("vllm.v1.request:RequestStatus.FINISHED_ABORTED"),
        Need("vllm.sampling_params:SamplingParams.max_tokens"),
        Need("vllm.sampling_params:SamplingParams.stop_token_ids"),
        Need("vllm.v1.engine.core:EngineCore.request_block_hasher"),
        Need("vllm.v1.core.kv_cache_utils:get_request_block_hasher"),
        Need("vllm.v1.core.kv_cache_utils:init_none_hash"),
    )

    def make(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling_params: Any,
        block_hasher: Any,
        cache_salt: str | None = None,
    ) -> Any:
        from vllm.v1.request import Request

        arguments = dict.fromkeys(_NEVER_USED) | {
            "request_id": request_id,
            "prompt_token_ids": list(token_ids),
            "sampling_params": sampling_params,
            "block_hasher": block_hasher,
            "cache_salt": cache_salt,
        }
        accepted = _parameters(Request)
        return Request(**{name: value for name, value in arguments.items() if name in accepted})

    def require_cache_salt(self) -> None:
        from vllm.v1.request import Request

        if "cache_salt" not in _parameters(Request):
            raise UnsupportedVllmError(
                "this vLLM's Request takes no cache_salt, without which cached tokens may have no states. Capture "
                "without enable_prefix_caching (--share-prefixes)",
                missing=("vllm.v1.request:Request.__init__(cache_salt)",),
            )

    def block_hasher(self, core: Any, scheduler: Any) -> Any:
        if core is not None:
            return core.request_block_hasher
        config = scheduler.cache_config
        if not config.enable_prefix_caching and scheduler.get_kv_connector() is None:
            return None
        return _build_block_hasher(scheduler, config.prefix_caching_hash_algo)


@functools.cache  # it takes longer than all else of a request
def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.__init__).parameters)


def _build_block_hasher(scheduler: Any, algorithm: str) -> Any:
    """What EngineCore builds, for a caller who has a scheduler and no EngineCore."""
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    try:
        from vllm.utils.hashing import get_hash_fn_by_name
    except ImportError:  # 0.11.0 and before; goes when 0.11.0 does
        from vllm.utils import get_hash_fn_by_name

    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    # The block pool compares with its own size, so that is the one to hash by; 0.11 has one size for everything.
    pool = scheduler.kv_cache_manager.block_pool
    block_size = getattr(pool, "hash_block_size", None) or scheduler.cache_config.block_size
    config = getattr(scheduler, "vllm_config", None)
    lookahead = getattr(config, "num_hash_lookahead_tokens", None)  # 0.33 on
    return get_request_block_hasher(block_size, hash_function, *([lookahead] if lookahead else []))


BEHAVIOURS: tuple[type[RequestFactory], ...] = (BySignature,)
