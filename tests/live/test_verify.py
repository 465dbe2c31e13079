"""``verify`` on what the real engine wrote: right runs pass, a wrong label is called by its name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from io import BytesIO

import pytest
from extraction import rows_of_text, run_extract

from conftest import ON_GPU, skip_if_faulty
from vllm_compat.extract.checksum import xxh3
from vllm_compat.extract.journal import Entry, encode_entry, entry_at
from vllm_compat.extract.sidecars import look_at
from vllm_compat.formats import SampleData, get_format
from vllm_compat.verify import VerifyConfig, verify

LAYERS = (2, 15, 27, 29, "norm")
JOURNAL = "journal-0-of-1.jsonl"


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """The folder of a run of SmolLM2 in bfloat16."""
    if not ON_GPU:
        skip_if_faulty("bfloat16")
    rows = rows_of_text(model("smollm2"))
    options = f"--batch-size 4 --no-rehearsal --layer-ids {' '.join(map(str, LAYERS))}"
    output, _ = run_extract(model("smollm2"), tmp_path_factory.mktemp("verify"), rows, *options.split())
    return output


def relabelled(run, folder, layer_ids):
    """A copy of the run, every file and line of it consistent, that calls its layers otherwise."""
    shutil.copytree(run, folder)
    form = get_format("safetensors")
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    entries = [entry_at(BytesIO(line), 0) for line in lines]
    with (folder / JOURNAL).open("wb") as journal:
        for entry in entries:
            sample = form.decode(folder / entry.file, entry.index)
            metadata = {**sample.metadata, "post_norm": json.dumps([layer_id == "norm" for layer_id in layer_ids])}
            other = SampleData(
                *(sample.index, sample.id, sample.token_ids, sample.loss_mask, layer_ids),
                hidden_states=sample.hidden_states.clone(),  # of a file that is written over
                metadata=metadata,
            )
            data = b"".join(map(bytes, form.encode(other)))
            (folder / entry.file).write_bytes(data)
            line = Entry(entry.index, entry.file, len(data), xxh3([data]), entry.tokens, entry.sampled, entry.id)
            journal.write(encode_entry(line))
    record = json.loads((folder / "run.json").read_text())
    record["identity"]["layer_ids"] = list(layer_ids)
    record["summary"]["bytes"] = sum(path.stat().st_size for path in folder.glob("hs_*"))
    (folder / "draft_config.json").write_text(
        json.dumps({"eagle_aux_hidden_state_layer_ids": [k + 1 for k in layer_ids if k not in (29, "norm")]})
    )
    record["sidecars"] = [asdict(look_at(folder, "draft_config.json"))]
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def problems(verdict):
    return [str(problem) for problem in verdict.first]


def test_a_run_of_the_engine_is_right_in_every_way(run, model, tmp_path):
    command = ["-m", "vllm_compat.verify", str(run), "--model", str(model("smollm2")), "--json", str(tmp_path / "json")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "GOOD: all 12 samples" in done.stdout
    assert "12 of 12" in done.stdout
    found = json.loads((tmp_path / "json").read_text())
    assert found["problems"] == []
    assert found["scan"]["good"] == 12
    assert found["input"]["why_not_compared"] == ""
    assert [check["layer_id"] for check in found["self_checks"]] == [29, "norm"]
    for check in found["self_checks"]:
        assert check["checked"] == check["exact"] + check["tied"] == 12
    assert len(found["recomputed"]["samples"]) == 4
    for layer in found["recomputed"]["layers"]:
        assert layer["ours"]["typical"] <= 2 * layer["noise"]["typical"]
        assert layer["nearest_error"] > 5 * layer["noise"]["typical"]
        assert layer["looks_like"] == []


def test_a_shifted_layer_id_is_called_by_its_name(run, model, tmp_path):
    folder = relabelled(run, tmp_path / "shifted", (3, 16, 28, 29, "norm"))
    assert verify(VerifyConfig(folder)).exit_code == 0  # all that it says of itself agrees
    verdict = verify(VerifyConfig(folder, model=str(model("smollm2")), samples=3))
    assert verdict.exit_code == 5
    for wrong, right in ((3, 2), (16, 15), (28, 27)):
        assert any(f"layer {wrong} matches layer {right} " in problem for problem in problems(verdict))
    assert verdict.num_problems == 3


def test_the_norm_on_the_wrong_side_is_called_by_its_name(run, model, tmp_path):
    folder = relabelled(run, tmp_path / "swapped", (2, 15, 27, "norm", 29))
    verdict = verify(VerifyConfig(folder, model=str(model("smollm2")), samples=12))
    assert verdict.exit_code == 5
    found = " | ".join(problem.what for problem in verdict.first)
    assert "the last entry is post-norm, the run says pre-norm: undoing the final norm" in found
    assert "the entry `norm` is pre-norm, or of another layer" in found
    assert "computed again: the last entry is post-norm, the run says pre-norm" in found
    assert "computed again: the last entry is pre-norm, the run says post-norm" in found


def test_another_token_than_was_sampled_is_named(run, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(run, folder)
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    entries = [entry_at(BytesIO(line), 0) for line in lines]
    fields = {name: getattr(entries[5], name) for name in Entry.__slots__}
    lines[5] = encode_entry(Entry(**fields | {"sampled": (entries[5].sampled + 1) % 1000}))
    (folder / JOURNAL).write_bytes(b"".join(lines))
    verdict = verify(VerifyConfig(folder))
    assert verdict.exit_code == 5
    assert {problem.index for problem in verdict.first} == {entries[5].index}
    assert any(problem.what.startswith("its metadata says sampled_token") for problem in verdict.first)
