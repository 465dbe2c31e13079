"""A request as asked for, checked against an engine's limits."""

from __future__ import annotations

from collections.abc import Container

from vllm_compat.errors import RequestError

__all__ = ["check_request"]


def check_request(
    token_ids: object,
    request_id: object,
    max_tokens: int,
    *,
    taken: Container[str],
    vocab_size: int,
    max_model_len: int,
) -> tuple[int, ...]:
    """The prompt as plain integers.

    Raises:
        RequestError: an empty, too long or out-of-vocabulary prompt, a bad id or one in use, or ``max_tokens`` < 1.
    """
    if not isinstance(request_id, str) or not request_id:
        raise RequestError("a request id is a text that is not empty", request_id=str(request_id))
    if request_id in taken:
        raise RequestError(
            "the id is in use by a request that is unfinished or not yet collected", request_id=request_id
        )
    as_list = getattr(token_ids, "tolist", None)  # of a tensor or an array
    ids: tuple[int, ...] = tuple(as_list() if as_list else token_ids)  # type: ignore[arg-type]
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(t for t in ids if type(t) is not int or not 0 <= t < vocab_size)
        raise RequestError(
            f"token id {wrong!r} is not an integer in range({vocab_size}), the model's vocabulary",
            request_id=request_id,
        )
    if not 0 < len(ids) < max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; wanted 1 to {max_model_len - 1} (max_model_len - 1: the token "
            "sampled after the prompt needs a place)",
            request_id=request_id,
        )
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}; vLLM samples at least one token", request_id=request_id)
    return ids
