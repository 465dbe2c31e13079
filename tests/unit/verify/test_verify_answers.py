"""A run with answers: the prompt is the input's, what follows is the model's, and the mask tells them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.unit.verify.conftest import words
from tests.unit.verify.test_verify_scan import rewrite

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun, Verify

    from vllm_compat.formats import SampleData


def test_a_good_run_is_good(make_run: MakeRun, check: Verify) -> None:
    verdict = check(make_run(generate=6))
    assert words(verdict) == []
    assert (verdict.scan.good, verdict.input_why_not) == (7, "")


def other_prompt(sample: SampleData) -> dict[str, Any]:
    return {"token_ids": (sample.token_ids[0] ^ 1, *sample.token_ids[1:])}


def longer_answer(sample: SampleData) -> dict[str, Any]:
    assert sample.loss_mask
    return {
        "token_ids": (*sample.token_ids, 1),
        "loss_mask": (*sample.loss_mask, 1),
        "hidden_states": np.concatenate([sample.hidden_states, sample.hidden_states[-1:]]),
    }


def shorter_prompt(sample: SampleData) -> dict[str, Any]:
    assert sample.loss_mask
    return {"token_ids": sample.token_ids[:1], "loss_mask": (0,), "hidden_states": sample.hidden_states[:1]}


def other_mask(sample: SampleData) -> dict[str, Any]:
    assert sample.loss_mask
    at = sample.loss_mask.index(1)
    return {"loss_mask": (0,) * (at + 1) + (1,) * (len(sample.loss_mask) - at - 1)}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_prompt, "its tokens are not the input's"),
        (longer_answer, "6 tokens follow its prompt, and 5 at most are an answer's"),
        (shorter_prompt, "its tokens are not the input's: 1 and"),
        (other_mask, "its loss mask is not that of prompt and answer"),
    ],
)
def test_what_differs_is_named(make_run: MakeRun, check: Verify, change: Any, what: str) -> None:
    folder = make_run(generate=6)
    rewrite(folder, 3, change)
    verdict = check(folder)
    assert any(what in text for text in words(verdict)), words(verdict)
    assert 3 in (found := {problem.index for problem in verdict.first})
    assert found <= {3, None}, "the sums of the run are wrong, too"


def test_tokens_sampled_at_random_need_not_be_the_likeliest(make_run: MakeRun, check: Verify) -> None:
    verdict = check(make_run(generate=6, sampling={"temperature": 0.7}))
    assert words(verdict) == []
    assert "sampled at temperature 0.7" in verdict.self_check_why_not


def test_a_penalty_can_make_another_token_the_likeliest(make_run: MakeRun, check: Verify) -> None:
    verdict = check(make_run(generate=6, sampling={"repetition_penalty": 1.2, "seed": 3}))
    assert words(verdict) == []
    assert "sampled with repetition_penalty, which can" in verdict.self_check_why_not
