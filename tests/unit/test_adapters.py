"""Which behaviours fit which vLLM, and what they do with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.vllm_tree import REQUEST_0_11, REQUEST_0_32, importing, write_distribution, write_vllm

from vllm_compat._adapters import registry, request, rows, step
from vllm_compat._adapters.outputs import ByValue
from vllm_compat._adapters.registry import VARIATIONS, Adapter, behaviours, choose, named
from vllm_compat._adapters.request import BySignature
from vllm_compat._adapters.rows import PersistentBatch, SortedBatch, first_position
from vllm_compat._adapters.step import OnePhase, TwoPhase, is_pending
from vllm_compat._detect.surface import Surface


def adapter(home: Path, **differences: Any) -> Adapter:
    return choose(Surface(write_vllm(home, **differences)))


# the choice


def test_a_vllm_with_sample_tokens_has_steps_of_two_phases(tmp_path: Path) -> None:
    assert adapter(tmp_path, two_phase=True).chosen["step"] == ("two-phase",)


def test_a_vllm_without_sample_tokens_has_steps_of_one_phase(tmp_path: Path) -> None:
    assert adapter(tmp_path, two_phase=False).chosen["step"] == ("one-phase",)


def test_the_version_has_no_say_in_it(tmp_path: Path) -> None:
    assert adapter(tmp_path, two_phase=False, version="0.32.0").chosen["step"] == ("one-phase",)
    assert adapter(tmp_path / "old", two_phase=True, version="0.11.0").chosen["step"] == ("two-phase",)


@pytest.mark.parametrize("inherits", [False, True])
@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("request_params", [REQUEST_0_11, REQUEST_0_32, "request_id, **kwargs"])
def test_each_variation_is_served(inherits: bool, two_phase: bool, request_params: str, tmp_path: Path) -> None:
    found = adapter(tmp_path, inherits=inherits, two_phase=two_phase, request_params=request_params)
    phase = "two-phase" if two_phase else "one-phase"
    assert (
        found.name
        == found.nearest
        == (f"request=by-signature step={phase} outputs=by-value rows=persistent-batch|sorted-batch states=layer-hooks")
    )
    assert found.missing == ()


def test_both_kinds_of_runner_are_kept_where_both_exist_and_the_worker_settles_it(tmp_path: Path) -> None:
    assert adapter(tmp_path, v2_runner=True).chosen["rows"] == ("persistent-batch", "sorted-batch")
    assert adapter(tmp_path / "old", v2_runner=False).chosen["rows"] == ("persistent-batch",)
    gone = adapter(tmp_path / "new", without=["vllm.v1.worker.gpu_input_batch"])
    assert gone.chosen["rows"] == ("sorted-batch",)


def test_an_unknown_required_parameter_of_a_request_is_refused_by_name(tmp_path: Path) -> None:
    found = adapter(tmp_path, request_params=f"tenant, {REQUEST_0_32}, *, priority_class, quota=1")
    assert found.chosen["request"] == ()
    assert found.missing == (
        "vllm.v1.request:Request.__init__(unknown required priority_class)",
        "vllm.v1.request:Request.__init__(unknown required tenant)",
    )


def test_a_lost_parameter_of_a_request_is_refused_by_name(tmp_path: Path) -> None:
    found = adapter(tmp_path, request_params="request_id, prompt_token_ids, sampling_params, hasher=None")
    assert found.missing == ("vllm.v1.request:Request.__init__(block_hasher)",)


def test_a_schedule_that_requires_an_argument_is_refused_by_name(tmp_path: Path) -> None:
    assert adapter(tmp_path, schedule_params="throttle=False").missing == ()
    found = adapter(tmp_path / "new", schedule_params="deadline")
    assert found.missing == ("vllm.v1.core.sched.scheduler:Scheduler.schedule(unknown required deadline)",)


def test_what_is_missing_is_told_by_the_behaviour_that_came_closest(tmp_path: Path) -> None:
    found = adapter(tmp_path, two_phase=False, without=["vllm.v1.executor.abstract:Executor.get_class"])
    assert found.chosen["step"] == ()
    assert found.missing == ("vllm.v1.executor.abstract:Executor.get_class",)
    assert "step=one-phase" in found.nearest
    assert "step=none" in found.name


def test_a_behaviour_refused_for_what_exists_is_not_the_closest_one(tmp_path: Path) -> None:
    bitmask = "vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask"
    found = adapter(tmp_path, without=[bitmask])
    assert found.missing == (bitmask,)
    assert "step=two-phase" in found.nearest


def needed_symbols() -> list[str]:
    own = [b for v in VARIATIONS for b in behaviours(v)]
    return sorted({need.symbol for b in own for need in b.needs} - {"vllm.v1.executor.abstract:Executor.sample_tokens"})


@pytest.mark.parametrize("symbol", needed_symbols())
def test_the_loss_of_any_symbol_that_is_needed_is_noticed(symbol: str, tmp_path: Path) -> None:
    found = adapter(tmp_path, without=[symbol])
    refused = [v for v in found.verdicts if symbol in v.missing]
    assert refused
    assert not any(v.fits for v in refused)
    assert all(symbol in v.reason for v in refused)


def test_every_verdict_has_its_reason(tmp_path: Path) -> None:
    reasons = {(v.variation, v.name): (v.fits, v.reason) for v in adapter(tmp_path).verdicts}
    assert set(reasons) == {(v, b.name) for v in VARIATIONS for b in behaviours(v)}
    assert reasons["step", "one-phase"] == (False, "vllm.v1.executor.abstract:Executor.sample_tokens exists")
    fits, reason = reasons["request", "by-signature"]
    assert fits
    assert reason.startswith("found vllm.v1.request:Request.__init__, ")


def test_each_variation_has_behaviours_of_its_own_kind_and_name() -> None:
    for variation in VARIATIONS:
        names = [b.name for b in behaviours(variation)]
        assert names
        assert len(set(names)) == len(names)
        assert {b.variation for b in behaviours(variation)} == {variation}
        assert [type(named(variation, name)) for name in names] == list(behaviours(variation))


# behaviours of other distributions


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs a distribution that registers ``vendor_module:thing``; the registry forgets it afterwards."""

    def install(module: str) -> None:
        site = tmp_path / "vendor-site"
        points = {"entry_points.txt": "[vllm_compat.adapters]\nfast = vendor_module:thing\n"}
        write_distribution(site, "vendor-1.0.dist-info", name="vendor", version="1.0", record=[], files=points)
        (site / "vendor_module.py").write_text(module, encoding="utf-8")
        monkeypatch.syspath_prepend(str(site))
        behaviours.cache_clear()

    yield install
    sys.modules.pop("vendor_module", None)
    behaviours.cache_clear()


STEP_OF_A_VENDOR = """
from vllm_compat._detect.need import Need
from vllm_compat._adapters.step import TwoPhase

class thing(TwoPhase):
    name = "vendor-step"
    needs = (Need("vllm.v1.executor.abstract:Executor.fused_step"),)
"""
FUSED = {"v1/executor/abstract.py": "class Executor:\n    def fused_step(self): ...\n"}


def test_a_fitting_behaviour_of_a_vendor_is_preferred(vendor: Any, tmp_path: Path) -> None:
    vendor(STEP_OF_A_VENDOR)
    assert adapter(tmp_path, add=FUSED).chosen["step"] == ("vendor-step",)
    assert type(named("step", "vendor-step")).__module__ == "vendor_module"
    assert [b.name for b in behaviours("step")] == ["vendor-step", "two-phase", "one-phase"]


def test_a_behaviour_of_a_vendor_that_fits_beside_our_own_comes_first(vendor: Any, tmp_path: Path) -> None:
    vendor(STEP_OF_A_VENDOR.replace("fused_step", "sample_tokens"))
    assert adapter(tmp_path).chosen["step"] == ("vendor-step", "two-phase")


def test_a_behaviour_of_a_vendor_that_does_not_fit_is_not_used(vendor: Any, tmp_path: Path) -> None:
    vendor(STEP_OF_A_VENDOR)
    found = adapter(tmp_path)
    assert found.chosen["step"] == ("two-phase",)
    assert "vendor-step" in [v.name for v in found.verdicts]


def test_a_vendor_s_behaviour_serves_a_vllm_that_none_of_ours_does(vendor: Any, tmp_path: Path) -> None:
    vendor(
        "from vllm_compat._detect.need import Need\n"
        "from vllm_compat._adapters.request import BySignature\n"
        "class thing(BySignature):\n"
        "    name = 'with-tenant'\n"
        "    needs = (Need('vllm.v1.request:Request.__init__', ('tenant',)),)\n"
    )
    assert adapter(tmp_path, request_params=f"tenant, {REQUEST_0_32}").chosen["request"] == ("with-tenant",)


@pytest.mark.parametrize("thing", ["thing = 1", "class thing: ...", "def thing(): ..."])
def test_a_registered_object_that_is_no_behaviour_is_a_type_error(thing: str, vendor: Any) -> None:
    vendor(thing)
    with pytest.raises(TypeError, match=r"'fast' of group 'vllm_compat.adapters' is .*, not a Behaviour class"):
        behaviours("step")


def test_a_registered_behaviour_of_an_unknown_variation_is_a_type_error(vendor: Any) -> None:
    vendor("from vllm_compat._adapters.base import Behaviour\nclass thing(Behaviour):\n    variation = 'stepp'\n")
    with pytest.raises(TypeError, match=r"varies 'stepp'; known are request, step, outputs, rows, states"):
        behaviours("step")


def test_the_group_is_the_one_that_the_error_text_names() -> None:
    assert registry.ENTRY_POINTS == "vllm_compat.adapters"


# request


@pytest.mark.parametrize(
    ("request_params", "never_used"),
    [
        (REQUEST_0_11, {"pooling_params": None, "eos_token_id": None}),
        (REQUEST_0_32, {"pooling_params": None}),
        ("request_id, prompt_token_ids, *, sampling_params, block_hasher=None", {}),
        (
            "request_id, prompt_token_ids, multi_modal_kwargs, multi_modal_hashes, multi_modal_placeholders, "
            "sampling_params, block_hasher=None",
            {"multi_modal_kwargs": None, "multi_modal_hashes": None, "multi_modal_placeholders": None},
        ),
    ],
)
def test_a_request_gets_those_of_our_arguments_that_its_constructor_has(
    request_params: str, never_used: dict[str, Any], tmp_path: Path
) -> None:
    write_vllm(tmp_path, request_params=request_params, importable=True)
    with importing(tmp_path):
        made = BySignature().make("r", (1, 2), "sampling", "hasher")
    ours = {"request_id": "r", "prompt_token_ids": [1, 2], "sampling_params": "sampling", "block_hasher": "hasher"}
    assert {name: made.given[name] for name in {*ours, *never_used}} == ours | never_used
    assert set(made.given) - {*ours, *never_used} <= {"client_index", "session_id"}


def test_an_engine_core_s_own_block_hasher_is_used() -> None:
    assert BySignature().block_hasher(SimpleNamespace(request_block_hasher="its own"), None) == "its own"
    assert BySignature().block_hasher(SimpleNamespace(request_block_hasher=None), None) is None


@pytest.mark.parametrize(
    ("caching", "connector", "wanted"), [(False, None, False), (True, None, True), (False, "kv", True)]
)
def test_a_scheduler_alone_needs_a_block_hasher_with_prefix_caching_or_a_connector(
    caching: bool, connector: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(enable_prefix_caching=caching, prefix_caching_hash_algo="sha256")
    scheduler = SimpleNamespace(cache_config=config, get_kv_connector=lambda: connector)
    monkeypatch.setattr(request, "_build_block_hasher", lambda scheduler, algorithm: f"built with {algorithm}")
    assert BySignature().block_hasher(None, scheduler) == ("built with sha256" if wanted else None)


HASHING = """
def get_hash_fn_by_name(name):
    return f"hash function {name}"
"""
BLOCK_HASHER = """
ready = []

def init_none_hash(hash_function):
    ready.append(hash_function)

def get_request_block_hasher(*arguments):
    assert ready == [arguments[1]]
    return arguments
"""


@pytest.mark.parametrize("place", ["utils/hashing.py", "utils/__init__.py"])
@pytest.mark.parametrize(
    ("pool", "config", "wanted"),
    [
        ({"hash_block_size": 32}, {}, (32,)),
        ({"hash_block_size": None}, {}, (16,)),
        ({}, {}, (16,)),
        ({"hash_block_size": 32}, {"num_hash_lookahead_tokens": 2}, (32, 2)),
        ({"hash_block_size": 32}, {"num_hash_lookahead_tokens": 0}, (32,)),
    ],
)
def test_the_block_hasher_for_a_scheduler_alone_is_the_one_its_engine_core_would_build(
    place: str, pool: dict[str, Any], config: dict[str, Any], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    write_vllm(tmp_path, importable=True, add={place: HASHING, "v1/core/kv_cache_utils.py": BLOCK_HASHER})
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256", block_size=16),
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(**pool)),
        vllm_config=SimpleNamespace(**config),
    )
    with importing(tmp_path):
        size, *lookahead = wanted
        assert BySignature().block_hasher(None, scheduler) == (size, "hash function sha256", *lookahead)


# step


class Executor:
    """Answers ``execute_model`` and ``sample_tokens`` with what it was given, and records the calls."""

    def __init__(self, forwarded: Any, sampled: Any = None) -> None:
        self.forwarded, self.sampled = forwarded, sampled
        self.calls: list[tuple[str, Any]] = []

    def execute_model(self, scheduler_output: Any) -> Any:
        self.calls.append(("execute_model", scheduler_output))
        return self.forwarded

    def meanwhile(self) -> None:
        self.calls.append(("meanwhile", None))

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.calls.append(("sample_tokens", grammar_output))
        return self.sampled


class Scheduler:
    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        return f"bitmask of {scheduler_output}"


class Unresolved:
    """An output whose copy to the host is under way."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def get_output(self) -> Any:
        return self.output


def future(value: Any) -> Future[Any]:
    made: Future[Any] = Future()
    made.set_result(value)
    return made


def forms(output: Any) -> list[Any]:
    return [output, future(output), *([] if output is None else [Unresolved(output), future(Unresolved(output))])]


@pytest.mark.parametrize("forwarded", forms("output"))
def test_a_step_of_one_phase_is_what_execute_model_gives_resolved(forwarded: Any) -> None:
    executor = Executor(forwarded)
    assert OnePhase().execute(executor, Scheduler(), "chosen", executor.meanwhile) == "output"
    assert executor.calls == [("execute_model", "chosen"), ("meanwhile", None)]


@pytest.mark.parametrize("forwarded", forms("output"))
def test_a_step_of_two_phases_does_not_sample_what_the_first_phase_answered(forwarded: Any) -> None:
    executor = Executor(forwarded, "never")
    assert TwoPhase().execute(executor, Scheduler(), "chosen", executor.meanwhile) == "output"
    assert executor.calls == [("execute_model", "chosen"), ("meanwhile", None)]


@pytest.mark.parametrize("forwarded", forms(None))
@pytest.mark.parametrize("sampled", forms("output"))
def test_a_step_of_two_phases_samples_once_when_the_first_gave_none(forwarded: Any, sampled: Any) -> None:
    executor = Executor(forwarded, sampled)
    assert TwoPhase().execute(executor, Scheduler(), "chosen", executor.meanwhile) == "output"
    assert executor.calls == [
        ("execute_model", "chosen"),
        ("meanwhile", None),
        ("sample_tokens", "bitmask of chosen"),
    ]


def test_the_error_of_a_future_is_raised() -> None:
    failed: Future[Any] = Future()
    failed.set_exception(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        TwoPhase().execute(Executor(failed), Scheduler(), "chosen", lambda: None)


def test_a_runner_is_pending_between_the_phases() -> None:
    assert is_pending(SimpleNamespace(execute_model_state=("batch",)))
    assert not is_pending(SimpleNamespace(execute_model_state=None))
    assert not is_pending(SimpleNamespace())


def test_the_wording_of_a_pending_step_is_vllm_s_own() -> None:
    assert step.PENDING == "sample_tokens() must be called after execute_model() returns None"


# outputs


def part(request_id: str, token_ids: Any, reason: Any = None) -> SimpleNamespace:
    return SimpleNamespace(request_id=request_id, new_token_ids=token_ids, finish_reason=reason)


class Reason:
    """vLLM's FinishReason is a number that prints as a word."""

    def __str__(self) -> str:
        return "length"


def test_an_update_by_client_is_read_whole() -> None:
    update = {
        0: SimpleNamespace(outputs=[part("a", [1, 2]), part("b", [], Reason())]),
        1: SimpleNamespace(outputs=[]),
        2: SimpleNamespace(outputs=[part("c", np.array([3], dtype=np.int64), Reason())]),
    }
    sampled, finished = ByValue().read(update)
    assert (sampled, finished) == ({"a": (1, 2), "c": (3,)}, {"b": "length", "c": "length"})
    assert [type(t) for token_ids in sampled.values() for t in token_ids] == [int, int, int]


def test_an_update_of_one_object_is_read() -> None:
    assert ByValue().read(SimpleNamespace(outputs=[part("a", [1])])) == ({"a": (1,)}, {})


def test_tokens_that_come_in_two_outputs_of_a_request_are_joined() -> None:
    update = SimpleNamespace(outputs=[part("a", [1]), part("a", [2], Reason())])
    assert ByValue().read(update) == ({"a": (1, 2)}, {"a": "length"})


@pytest.mark.parametrize("update", [None, {}])
def test_an_empty_update_has_no_outputs(update: Any) -> None:
    assert ByValue().read(update) == ({}, {})


# rows


def scheduled(new: dict[str, int], cached: dict[str, int]) -> SimpleNamespace:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=i, num_computed_tokens=n) for i, n in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
    )


def test_the_first_position_of_new_and_of_continued_requests() -> None:
    assert first_position(scheduled({"new": 0}, {"going": 7, "other": 3})) == {"new": 0, "going": 7, "other": 3}
    assert first_position(scheduled({}, {})) == {}


def test_the_first_position_of_a_request_resumed_after_preemption_goes_back() -> None:
    assert first_position(scheduled({}, {"resumed": 0})) == {"resumed": 0}
    # The V2 runner is told of it as of a new one.
    assert first_position(scheduled({"resumed": 0}, {"going": 9})) == {"resumed": 0, "going": 9}


V1 = SimpleNamespace(
    input_batch=SimpleNamespace(req_ids=["b", "a"]), input_ids=SimpleNamespace(gpu="v1 ids"), execute_model_state=None
)
BATCH = SimpleNamespace(req_ids=["b", "a"], input_ids="v2 ids")


@pytest.mark.parametrize(
    ("runner", "kind", "ids"),
    [
        (V1, PersistentBatch, "v1 ids"),
        (SimpleNamespace(req_states=1, execute_model_state=SimpleNamespace(input_batch=BATCH)), SortedBatch, "v2 ids"),
        (SimpleNamespace(req_states=1, execute_model_state=("hidden", BATCH, None)), SortedBatch, "v2 ids"),
    ],
)
def test_each_kind_of_runner_is_served_by_one_behaviour_that_reads_its_rows(
    runner: Any, kind: type[rows.RowOwners], ids: str
) -> None:
    assert [k for k in rows.BEHAVIOURS if k().serves(runner)] == [kind]
    assert list(kind().request_ids(runner)) == ["b", "a"]
    assert kind().token_ids(runner) == ids


def test_an_unknown_runner_is_served_by_none() -> None:
    assert [k for k in rows.BEHAVIOURS if k().serves(SimpleNamespace(input_batch=None))] == []
