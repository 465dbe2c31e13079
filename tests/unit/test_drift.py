"""Every recorded release is served by the adapters, and a release that is not is told what it lacks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

from vllm_compat._adapters.registry import VARIATIONS, choose
from vllm_compat._detect.matrix import load_matrix

MATRIX = Path(__file__).parents[2] / "matrix"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drift", MATRIX / "drift.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["drift"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


drift = _load()
RECORDED: list[str] = drift.recorded()


@pytest.mark.parametrize("vllm", RECORDED)
def test_a_recorded_release_is_served_in_every_variation(vllm: str) -> None:
    adapter = choose(drift.load(vllm))
    assert {v: bool(names) for v, names in adapter.chosen.items()} == dict.fromkeys(VARIATIONS, True)
    assert adapter.chosen["step"] in [("one-phase",), ("two-phase",)]


def test_the_second_phase_of_a_step_came_with_0_11_1() -> None:
    phases = {v: choose(drift.load(v)).chosen["step"][0] for v in RECORDED}
    assert [v for v in RECORDED if phases[v] == "one-phase"] == ["0.10.1", "0.10.1.1", "0.10.2", "0.11.0"]


def test_every_release_of_the_table_is_recorded_and_every_need_is_in_every_record() -> None:
    assert {r.vllm for r in load_matrix()} <= set(RECORDED)
    symbols = {need.symbol for _, need in drift.needs()}
    assert {v: set(drift.load(v).symbols) for v in RECORDED} == dict.fromkeys(RECORDED, symbols)


@pytest.mark.parametrize("vllm", RECORDED[-3:])
def test_a_release_that_nobody_knew_is_reported_against_the_one_before(vllm: str) -> None:
    """The newest three, hidden and then discovered one by one: none of them needed anything."""
    old = drift.load(RECORDED[RECORDED.index(vllm) - 1])
    text = drift.report(old, drift.load(vllm))
    assert f"compared with {old.vllm}" in text
    assert "every probe passes" in text
    assert ("+num_hash_lookahead_tokens" in text) == (vllm == "0.33.0")


def test_a_release_without_an_adapter_is_told_what_moved_and_where_to_write(tmp_path: Path) -> None:
    newest = drift.load(RECORDED[-1])
    gone = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"
    request = dict(newest.symbols["vllm.v1.request:Request.__init__"])
    request |= {"parameters": [*request["parameters"], "tenant"], "required": [*request["required"], "tenant"]}
    future = drift.Record("99.0.0", {**newest.symbols, gone: None, "vllm.v1.request:Request.__init__": request})
    package = tmp_path / "vllm"
    (package / "v1").mkdir(parents=True)
    (package / "v1" / "elsewhere.py").write_text("class S:\n    def update_from_output(self): ...\n")
    text = drift.report(newest, future, package)
    assert f"gone      {gone}" in text
    assert "+tenant, tenant is required now" in text
    assert "NO ADAPTER FITS" in text
    assert f"{gone}  (that name is now in vllm.v1.elsewhere)" in text
    assert "vllm.v1.request:Request.__init__(unknown required tenant)" in text
    assert "_adapters/outputs.py" in text
    assert "_adapters/request.py" in text


def test_nothing_moved_is_said_so() -> None:
    one = drift.load(RECORDED[0])
    assert drift.drift(one, one) == []
    assert "nothing that we stand on has moved" in drift.report(one, one)


def test_records_are_in_order_of_their_versions() -> None:
    assert sorted(RECORDED, key=Version) == RECORDED


def test_an_index_is_watched_for_what_the_table_lacks() -> None:
    rows = [r.vllm for r in load_matrix()]
    words = f"vllm (99.1)\nAvailable versions: 99.1, 99.0rc1, {', '.join(reversed(rows))}, 0.9.2, 0.1.0\n"
    assert drift.unlisted(words) == ["99.1"]
    assert drift.unlisted(words.replace(f" {rows[-2]},", "")) == ["99.1"]
    with pytest.raises(SystemExit, match="does not name"):
        drift.unlisted("ERROR: no network")


def test_a_report_is_written_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(["--report", "0.16.0", "--to", str(tmp_path)]) == 0
    assert (tmp_path / "0.16.0.txt").read_text() == capsys.readouterr().out
