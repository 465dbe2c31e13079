"""Whatever is asked of the fake engine, each request gets its own tokens and rows, once, in the order it was made."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat import CapturedStates
from vllm_compat.testing import FakeEngine, fake_row
from vllm_compat.types import LayerId

VOCAB_SIZE, MAX_MODEL_LEN, HIDDEN_SIZE = 20, 24, 4


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool


REQUESTS = st.lists(
    st.builds(
        Asked,
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 8),
        ignore_eos=st.booleans(),
    ),
    min_size=1,
    max_size=64,
)
LAYER_IDS: st.SearchStrategy[list[LayerId]] = st.lists(
    st.sampled_from([0, 1, 2, 3, "norm"]), min_size=1, max_size=3, unique=True
)


@given(
    asked=REQUESTS,
    layer_ids=LAYER_IDS,
    budget=st.integers(1, 100),
    max_num_seqs=st.integers(1, 64),
    made_per_step=st.integers(1, 64),
    collect_every=st.integers(1, 5),
    wait=st.booleans(),
    aborted=st.sets(st.integers(0, 63), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_each_request_gets_its_own_states_once_in_the_order_it_was_made(
    asked: list[Asked],
    layer_ids: list[LayerId],
    budget: int,
    max_num_seqs: int,
    made_per_step: int,
    collect_every: int,
    wait: bool,
    aborted: set[int],
) -> None:
    engine = FakeEngine(
        layer_ids, hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget, max_num_seqs=max_num_seqs,
    )  # fmt: skip
    collected: list[CapturedStates] = []
    scheduled = dict.fromkeys(range(len(asked)), 0)
    sampled: dict[int, list[int]] = {n: [] for n in scheduled}
    finished: dict[int, str] = {}
    gone: set[int] = set()
    to_make, steps = list(enumerate(asked)), 0

    def collect(wait: bool) -> None:
        batch = engine.get_captured_states(wait=wait)
        numbers = [int(s.request_id) for s in batch]
        assert numbers == sorted(numbers)
        collected.extend(batch)

    while to_make or engine.has_unfinished:
        for n, request in to_make[:made_per_step]:
            engine.make_request(
                request.prompt, request_id=str(n), max_tokens=request.max_tokens, ignore_eos=request.ignore_eos
            )
        del to_make[:made_per_step]
        result = engine.run_step()
        steps += 1
        assert 0 < sum(result.num_scheduled_tokens.values()) <= budget
        for request_id, count in result.num_scheduled_tokens.items():
            scheduled[int(request_id)] += count
        for request_id, made in result.sampled_token_ids.items():
            sampled[int(request_id)] += made
        finished |= {int(i): reason for i, reason in result.finished.items()}
        for n in aborted & {int(i) for i in result.num_scheduled_tokens} - set(finished):
            engine.abort(str(n))
            gone.add(n)
        if steps % collect_every == 0:
            collect(wait)
    collect(wait=True)

    assert sorted(int(s.request_id) for s in collected) == sorted(set(range(len(asked))) - gone) == sorted(finished)
    for states in collected:
        n = int(states.request_id)
        request, tokens = asked[n], [*asked[n].prompt, *states.output_token_ids[:-1]]
        assert states.token_ids == tuple(tokens)
        assert states.num_prompt_tokens == len(request.prompt)
        assert states.output_token_ids == tuple(sampled[n])
        assert scheduled[n] == len(tokens)
        assert states.finish_reason == finished[n]
        ended = states.output_token_ids[-1] == 0 and not request.ignore_eos
        full = len(states.output_token_ids) == request.max_tokens or len(tokens) + 1 == MAX_MODEL_LEN
        assert ended if states.finish_reason == "stop" else full
        assert list(states.layer_ids) == layer_ids
        for layer_id in layer_ids:
            assert states[layer_id] == [
                fake_row(layer_id, tokens[: row + 1], HIDDEN_SIZE) for row in range(len(tokens))
            ]
