"""``generate``: prompts in, and the states of prompts and answers out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vllm_compat.errors import CaptureError, RunMismatchError, StepError, UsageError
from vllm_compat.extract import Sample, extract
from vllm_compat.extract.answers import answered
from vllm_compat.testing import FakeEngine, FakeRequest
from vllm_compat.types import CapturedStates

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, Read, RunOf, SomeRows, StatesOf, WriteRows

PROMPTS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 0]},
    {"input_ids": [8], "id": "one"},
    {"input_ids": [9] * 60},
]


class Noting(FakeEngine):
    """Notes what it was asked."""

    asked: list[dict[str, Any]]

    def make_request(self, token_ids: Any, **options: Any) -> FakeRequest:
        self.asked.append({"tokens": len(token_ids), **options})
        return super().make_request(token_ids, **options)


def expected(prompt: list[int], count: int) -> list[int]:
    """Prompt and answer as the fake engine goes on, run one by one; ``count`` of the answer."""
    engine = FakeEngine((0,), num_layers=8, make_tensor=np.array)
    engine.make_request(prompt, max_tokens=count)
    while engine.has_unfinished:
        engine.run_step()
    (states,) = engine.get_captured_states()
    return [*states.token_ids, states.output_token_ids[-1]]


def test_prompt_and_answer_are_saved(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, read: Read, states_of: StatesOf
) -> None:
    """The last sampled token was never forwarded: it is named, and has no state."""
    write_rows(PROMPTS)
    settings = config(generate=10)
    summary = extract(settings, make_engine())
    assert summary.complete
    total = 0
    for index, row in enumerate(PROMPTS):
        prompt: list[int] = row["input_ids"]
        room = min(10, 65 - len(prompt))
        whole = expected(prompt, room)
        tensors, metadata = read(Path(settings.output_dir) / f"hs_{index}.safetensors")
        assert tensors["token_ids"].tolist() == whole[:-1]
        assert len(whole) == len(prompt) + room, "the fake engine went on to the end"
        assert tensors["loss_mask"].tolist() == [0] * len(prompt) + [1] * (room - 1)
        assert np.array_equal(tensors["hidden_states"], states_of(whole[:-1]))
        assert metadata["sampled_token"] == str(whole[-1])
        assert metadata["num_prompt_tokens"] == str(len(prompt))
        total += len(whole) - 1
    assert summary.tokens == total


def test_sampling_is_passed_on_and_every_sample_has_its_own_seed(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, run_of: RunOf
) -> None:
    write_rows(PROMPTS)
    engine = make_engine(Noting)
    assert isinstance(engine, Noting)
    engine.asked = []
    settings = config(generate=10, sampling={"temperature": 0.7, "seed": 40})
    extract(settings, engine)
    assert [(a["tokens"], a["max_tokens"]) for a in engine.asked] == [(3, 10), (1, 10), (60, 5)]
    assert [a["sampling"] for a in engine.asked] == [{"temperature": 0.7, "seed": seed} for seed in (40, 41, 42)]
    assert run_of(Path(settings.output_dir))["identity"]["sampling"] == {"temperature": 0.7, "seed": 40}


def test_without_answers_nothing_is_told_the_engine(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, run_of: RunOf
) -> None:
    """Nor is the run's identity another than it was before there were answers."""
    write_rows(PROMPTS)
    engine = make_engine(Noting)
    assert isinstance(engine, Noting)
    engine.asked = []
    settings = config()
    extract(settings, engine)
    assert all(a.keys() == {"tokens", "request_id"} for a in engine.asked)
    assert not {"generate", "sampling"} & run_of(Path(settings.output_dir))["identity"].keys()


def test_a_run_goes_on_with_its_answers(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, read: Read
) -> None:
    write_rows(some_rows(8))
    settings = config(generate=5)
    with pytest.raises(StepError):
        extract(settings, make_engine(max_num_seqs=1, fail_at_step=12))
    with pytest.raises(RunMismatchError) as caught:
        extract(config(), make_engine())
    assert set(caught.value.fields) == {"generate", "sampling"}
    summary = extract(settings, make_engine())
    assert (summary.complete, summary.samples) == (True, 8)
    assert 0 < summary.kept < 8
    for index, row in enumerate(some_rows(8)):
        tokens = read(Path(settings.output_dir) / f"hs_{index}.safetensors")[0]["token_ids"].tolist()
        assert tokens == expected(row["input_ids"], 5)[:-1]


def test_a_prompt_is_never_cut(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    write_rows(PROMPTS)
    with pytest.raises(UsageError, match="1 of 3 prompts have more than 59 tokens"):
        extract(config(generate=5, max_seq_len=59), make_engine())
    summary = extract(config(generate=5, max_seq_len=59, overlong="skip"), make_engine())
    assert (summary.complete, summary.skipped) == (True, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"generate": -1}, "generate must be at least 0"),
        ({"sampling": {"temperature": 1}}, "none are asked for"),
        ({"generate": 2, "sampling": {"max_tokens": 3}}, "may not set max_tokens"),
        ({"generate": 2, "sampling": {"seed": "a"}}, "seed of sampling must be an integer, found 'a'"),
    ],
)
def test_what_cannot_be_meant(config: MakeConfig, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config(**values)


def states(**changes: Any) -> CapturedStates:
    values: dict[str, Any] = {
        "request_id": "sample-0",
        "token_ids": (1, 2, 3, 4),
        "num_prompt_tokens": 2,
        "output_token_ids": (3, 4, 5),
        "layer_ids": (0,),
        "hidden_states": (np.zeros((4, 2)),),
        "finish_reason": "length",
    }
    return CapturedStates(**(values | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (1, 9, 3, 4)},
        {"token_ids": (1, 2, 9, 4)},
        {"token_ids": (1, 2, 3)},
        {"token_ids": (1, 2, 3, 4, 5)},
        {"num_prompt_tokens": 3},
        {"output_token_ids": (3, 9, 5)},
        {"output_token_ids": ()},
    ],
)
def test_the_answer_must_be_that_to_the_prompt(changes: dict[str, Any]) -> None:
    sample = Sample(0, 1, None, (1, 2), None, False)
    assert answered(sample, states()) == dataclasses.replace(sample, token_ids=(1, 2, 3, 4), loss_mask=(0, 0, 1, 1))
    with pytest.raises(CaptureError, match="not its prompt of 2"):
        answered(sample, states(**changes))


def test_the_sidecars_have_the_answers(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    """A dataset beside the files has what the files have; that of a sample that was left out is its prompt."""
    pytest.importorskip("datasets")
    pytest.importorskip("torch")
    import datasets

    write_rows([*PROMPTS, {"input_ids": [9] * 61}])
    settings = config(generate=5, max_seq_len=60, overlong="skip", format="speculators", layer_ids=(2, 0, 7))
    extract(settings, make_engine(layer_ids=(2, 0, 7)))
    found = datasets.load_from_disk(str(settings.output_dir))
    for row, has in zip(PROMPTS, found, strict=False):
        prompt: list[int] = row["input_ids"]
        assert has["input_ids"].tolist() == expected(prompt, min(5, 61 - len(prompt)))[:-1]
    assert len(found) == 4


def test_the_command_line(config: MakeConfig) -> None:
    from vllm_compat.extract.cli import config_of, make_parser

    line = "--model M --prepared-data F --output-dir D --generate 7 --sampling temperature=0.5 --sampling top-p=0.9"
    found = config_of(make_parser().parse_args(line.split()))
    assert (found.generate, found.sampling) == (7, {"temperature": 0.5, "top_p": 0.9})
    with pytest.raises(UsageError, match="--sampling temperature is given twice"):
        config_of(make_parser().parse_args([*line.split(), "--sampling", "temperature=1"]))
    assert json.loads(json.dumps(dict(found.sampling)))


@pytest.mark.parametrize(("generate", "said"), [(4, False), (0, True)])
def test_a_prompt_whose_mask_is_empty_is_no_sample_without_loss(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    caplog: pytest.LogCaptureFixture,
    generate: int,
    said: bool,
) -> None:
    """The mask of what comes of it is over the answer."""
    write_rows([{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}])
    with caplog.at_level("WARNING", "vllm_compat"):
        extract(config(generate=generate), make_engine())
    assert ("1 samples have no token under the loss mask" in caplog.text) == said
