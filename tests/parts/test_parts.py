"""What of vLLM can be proven without a kernel: it imports, it is what its source says, it plans, hashes and schedules.

Nothing is replaced but the model. For a release that has no CPU build, on a machine that has no GPU.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_worker import BLOCKS, LAYERS

import vllm_compat
from conftest import END, VOCAB, forwarded, prompt, run
from vllm_compat import detect
from vllm_compat._adapters.registry import VARIATIONS, named
from vllm_compat._detect.need import Need
from vllm_compat._detect.surface import Surface

SURFACE = Surface(detect().installed.package)


def needs() -> list[Need]:
    """What the behaviours that serve this vLLM stand on."""
    chosen = detect().require_adapter().chosen
    return [need for v in VARIATIONS for name in chosen[v] for need in named(v, name).needs]


def imported() -> Iterator[str]:
    """The modules of vLLM that our package imports, those apart that only other releases have."""
    for path in Path(vllm_compat.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield node.module


MODULES = sorted({*(n.symbol.partition(":")[0] for n in needs()), *(m for m in imported() if SURFACE.find(m))})
FUNCTIONS = sorted({n.symbol for n in needs() if SURFACE.find(n.symbol).parameters})


@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_we_touch_imports(module):
    assert importlib.import_module(module).__name__ == module


@pytest.mark.parametrize("symbol", FUNCTIONS)
def test_a_function_is_what_its_source_says(symbol):
    """We choose by reading files; here the live objects are asked."""
    module, _, path = symbol.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    live = inspect.signature(found).parameters
    accepted = [n for n, p in live.items() if n not in ("self", "cls") and p.kind is not p.VAR_KEYWORD]
    assert accepted == [n for n in SURFACE.find(symbol).parameters if n != "**"]


@pytest.fixture(scope="module")
def plain(open_engine):
    """No prefix caching; prompts are cut by a budget of 64 tokens."""
    return open_engine(enable_prefix_caching=False, max_num_batched_tokens=64)


def test_the_kv_cache_is_planned_by_vllm(plain):
    """As many blocks as there is memory for, every layer in the plan, and the scheduler's pool of that size."""
    config = plain._scheduler.kv_cache_config
    assert config.num_blocks == BLOCKS
    assert sorted(name for group in config.kv_cache_groups for name in group.layer_names) == LAYERS
    assert plain._scheduler.kv_cache_manager.block_pool.num_gpu_blocks == BLOCKS


def test_12_requests_run_to_their_end(plain):
    """Each position is forwarded once and in order, whatever the budget cuts, and each answer is its request's."""
    prompts = {f"r{n}": prompt(length, seed=n) for n, length in enumerate([1, 2, 33, 63, 64, 65, 100, 5, 7, 9, 11, 90])}
    for request_id, token_ids in prompts.items():
        plain.make_request(token_ids, request_id=request_id, max_tokens=4, ignore_eos=True)
    done = run(plain)
    assert done.keys() == prompts.keys()
    spans = forwarded(plain)
    for request_id, token_ids in prompts.items():
        assert done[request_id].output_token_ids == tuple(token_ids[-1] + n for n in range(1, 5))
        assert done[request_id].finish_reason == "length"
        assert [p for span in spans[request_id] for p in range(*span)] == list(range(len(token_ids) + 3))
    assert max(len(s) for s in spans.values()) > 4  # something was cut


def test_an_end_token_ends(plain):
    """``stop_token_ids`` is how we say it, since the constructor of a request lost its own argument."""
    plain.make_request([7, VOCAB - 2], request_id="ends", max_tokens=50)
    states = run(plain)["ends"]
    assert (states.output_token_ids, states.finish_reason) == ((VOCAB - 1, 0, 1, END), "stop")


def test_an_aborted_request_gives_its_blocks_back(plain):
    pool = plain._scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    for n in range(3):
        plain.make_request(prompt(100, seed=n), request_id=f"a{n}")
    plain.run_step()
    assert pool.get_num_free_blocks() < free
    plain.abort("a0", "a2")
    assert run(plain).keys() == {"a1"}
    assert pool.get_num_free_blocks() == free


def test_a_preempted_request_starts_over_and_ends_right(plain):
    """More than the cache holds: the scheduler takes blocks back, and positions start again at 0."""
    size = plain._scheduler.cache_config.block_size
    prompts = {f"p{n}": prompt(size - 2, seed=n) for n in range(BLOCKS - 1)}
    for request_id, token_ids in prompts.items():
        plain.make_request(token_ids, request_id=request_id, max_tokens=20, ignore_eos=True)
    done, spans = run(plain), forwarded(plain)
    for request_id, token_ids in prompts.items():
        assert done[request_id].output_token_ids == tuple(token_ids[-1] + n for n in range(1, 21))
        for (_, end), (start, _) in zip(spans[request_id], spans[request_id][1:], strict=False):
            assert start in (0, end)
    assert any(sum(start == 0 for start, _ in spans[request_id]) > 1 for request_id in prompts)


def test_a_request_has_no_hashes_where_none_are_needed(plain):
    assert plain.make_request(prompt(500, seed=0), add=False).block_hashes == []


@pytest.fixture(scope="module")
def caching(open_engine):
    """With prefix caching, whole prompts."""
    return open_engine(enable_prefix_caching=True, max_num_batched_tokens=1024)


def test_equal_beginnings_have_equal_hashes(caching):
    """One hash for each full block, and each says all that stands before it."""
    size = caching._scheduler.cache_config.block_size
    ours = prompt(3 * size + 1, seed=5)
    other = [*ours[: 2 * size], ours[2 * size] + 1, *ours[2 * size + 1 :]]
    first, second = (caching.make_request(ids, add=False).block_hashes for ids in (ours, other))
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]
    moved = caching.make_request([ours[0] + 1, *ours[1:]], add=False).block_hashes
    assert not set(moved) & set(first)


def test_the_second_time_a_prefix_is_not_scheduled(caching):
    size = caching._scheduler.cache_config.block_size
    token_ids = prompt(2 * size + 5, seed=6)
    for request_id in ("first", "second"):
        caching.make_request(token_ids, request_id=request_id)
        assert run(caching)[request_id].output_token_ids == (token_ids[-1] + 1,)
    spans = forwarded(caching)
    assert (spans["first"], spans["second"]) == ([(0, 2 * size + 5)], [(2 * size, 2 * size + 5)])


def test_attaching_to_scheduler_and_executor_finds_the_same_hasher(caching):
    """What a caller has who keeps no EngineCore."""
    attached = vllm_compat.attach(scheduler=caching._scheduler, executor=caching._executor)
    token_ids = prompt(500, seed=7)
    own = caching.make_request(token_ids, request_id="own", add=False)
    theirs = attached.make_request(token_ids, request_id="theirs", add=False)
    assert theirs.block_hashes == own.block_hashes != []
    attached.close()
    assert not caching.closed
