"""The command line: what it prints, what it returns, and that it loads nothing heavy."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.doctor.tree import KIMI_CONFIG, LLAMA_CONFIG, NATIVE, write_model, write_tree
from tests.unit.vllm_tree import importing

import vllm_compat
from vllm_compat.__main__ import main

HEAVY = ("torch", "vllm", "numpy", "transformers", "speculators", "triton")
SOURCE = Path(inspect.getfile(vllm_compat)).parent


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder on the module path, with a vLLM that must not be imported."""
    write_tree(tmp_path / "site", version="0.99.0", add=NATIVE)
    with importing(tmp_path / "site"):
        yield tmp_path / "site"


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    main([*argv, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("site")
def test_detect_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect"]) == 0
    out = capsys.readouterr().out
    assert "version       0.99.0" in out
    assert "standing      " in out
    assert "verdicts" not in out
    found = report(capsys, "detect")
    assert (found["version"], found["supported"]) == ("0.99.0", True)
    assert "verdicts" not in found


@pytest.mark.usefixtures("site")
def test_doctor_begins_with_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "decision"
    assert lines[1].split()[0] == "vllm"
    assert any(line.startswith("  step") and "fits" in line for line in lines)
    found = report(capsys, "doctor")
    assert found["decision"]["vllm"]["value"] is True
    assert found["vllm_compat"] == vllm_compat.__version__
    assert {"python", "neighbours", "verdicts", "capabilities"} <= found.keys()
    assert "model" not in found


@pytest.mark.usefixtures("site")
def test_doctor_of_a_model_says_the_same_in_text_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "kimi", KIMI_CONFIG)
    assert main(["doctor", "--model", model]) == 0
    text = capsys.readouterr().out
    found = report(capsys, "doctor", "--model", model)
    assert found["decision"]["model"]["value"] is True
    assert found["decision"]["natively"]["value"] is False
    assert found["model"]["layer_ids"]["value"] == [*range(61), "norm"]
    assert found["native"]["last_id"]["value"] is False
    for section in ("decision", "pair", "model", "native"):
        for name, statement in found[section].items():
            assert statement["evidence"]
            assert (
                f"  {name:<{max(map(len, found[section]))}}  {statement['text']}  [{statement['evidence']}]\n" in text
            )


@pytest.mark.usefixtures("site")
def test_a_model_that_cannot_be_captured_is_reported_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "m", {**LLAMA_CONFIG, "architectures": ["NoSuchForCausalLM"]})
    assert main(["doctor", "--model", model]) == 3
    printed = capsys.readouterr()
    assert "architecture" in printed.out
    assert printed.err.strip().startswith(
        "no, it cannot be captured here: NoSuchForCausalLM is not in the model registry"
    )
    assert main(["doctor", "--model", model, "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out)["decision"]["model"]["value"] is False
    assert printed.err == ""


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("no folder", "no local folder"),
    ],
)
def test_a_folder_that_says_nothing_of_its_model_is_a_usage_error(
    content: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    if content != "no folder":
        folder.mkdir()
        if content:
            (folder / "config.json").write_text(content, encoding="utf-8")
    assert main(["doctor", "--model", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: nothing is known of the model: ")
    assert why in printed.err
    assert "give a folder with the model's config.json" in printed.err


def test_a_vllm_that_nothing_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = "vllm.v1.executor.abstract:Executor.get_class"
    write_tree(tmp_path / "site", without=[lost])
    model = write_model(tmp_path / "m", LLAMA_CONFIG)
    with importing(tmp_path / "site"):
        assert main(["doctor", "--model", model]) == 3
    printed = capsys.readouterr()
    assert "no, it cannot be captured here: probes fail" in printed.out
    assert "Three ways out" in printed.err


def test_no_vllm_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_compat._detect.installed._importable", lambda: None)
    model = write_model(tmp_path / "m", LLAMA_CONFIG)
    assert main(["doctor", "--model", model]) == 3
    printed = capsys.readouterr()
    assert "no vLLM is installed" in printed.out
    assert "no vLLM is installed in this environment" in printed.err


def test_no_command_and_an_unknown_option_are_usage_errors() -> None:
    for argv in ([], ["doctor", "--models", "x"], ["detect", "--model", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2


@pytest.mark.parametrize("argv", [["detect"], ["doctor"], ["doctor", "--json", "--model", "MODEL"]])
def test_loads_neither_torch_nor_vllm_nor_any_neighbour(argv: list[str], tmp_path: Path) -> None:
    write_tree(tmp_path, add={**NATIVE, "config/vllm": "class VllmConfig:\n    def use_v2_model_runner(self): ...\n"})
    model = write_model(tmp_path / "model", {**LLAMA_CONFIG, "architectures": ["A", "LlamaForCausalLM"]})
    for name in HEAVY:
        if name != "vllm":
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("", encoding="utf-8")
    arguments = [model if a == "MODEL" else a for a in argv]
    code = (
        f"from vllm_compat.__main__ import main; assert main({arguments!r}) == 0\n"
        f"import sys; print(sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE.parent)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
