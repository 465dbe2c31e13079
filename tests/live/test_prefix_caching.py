"""With prefix caching a request needs block hashes, and without it none."""

from __future__ import annotations

import pytest

import vllm_compat
from conftest import prompt, run


@pytest.fixture(scope="module")
def engine(open_engine):
    return open_engine("llama", enable_prefix_caching=True)


def test_prompts_longer_than_a_block_are_served(engine):
    """Some releases die here without a hasher: an assertion, then an IndexError, once one block is full."""
    prompts = {f"r{n}": prompt(200, seed=n) for n in range(3)}
    for states in run(engine, prompts).values():
        assert len(states.output_token_ids) == 1
        assert states.hidden_states == ()


def test_a_request_has_hashes_exactly_when_the_engine_needs_them(engine):
    block_size = engine._scheduler.cache_config.block_size
    request = engine.make_request(prompt(200, seed=0), add=False)
    assert len(request.block_hashes) >= 200 // block_size >= 1


def test_the_second_time_the_prefix_is_not_forwarded(engine):
    token_ids = prompt(300, seed=42)
    engine.make_request(token_ids, request_id="first")
    assert dict(engine.run_step().num_scheduled_tokens) == {"first": 300}
    engine.make_request(token_ids, request_id="second")
    assert 0 < engine.run_step().num_scheduled_tokens["second"] < 300
    assert {s.request_id for s in engine.get_captured_states()} == {"first", "second"}


def test_attaching_to_scheduler_and_executor_finds_the_hasher_too(engine):
    """What a caller has who keeps no EngineCore: the same hashes as the engine's own."""
    attached = vllm_compat.attach(scheduler=engine._scheduler, executor=engine._executor)
    token_ids = prompt(300, seed=43)
    own = engine.make_request(token_ids, request_id="own", add=False)
    theirs = attached.make_request(token_ids, request_id="theirs")
    assert theirs.block_hashes == own.block_hashes != []
    assert attached.run_step().num_scheduled_tokens == {"theirs": 300}
    attached.close()
    assert not engine.closed
