"""README's table says what matrix/vllm.toml says."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import readme

from vllm_compat._detect.matrix import Release, load_matrix


def release(vllm: str, **fields: object) -> Release:
    usual: dict[str, object] = {"torch": "2.0.0", "cpu_wheel": "", "with_it": (), "without_dependencies": ()}
    usual |= {"environment": {}, "proven": {}, "faults": {}, "python": ">=3.9,<3.13"}
    return Release(vllm, **(usual | fields))  # type: ignore[arg-type]


def row(made: Release) -> list[str]:
    """The cells of its row."""
    (line,) = [line for line in readme.section([made], {}).splitlines() if line.startswith(f"| {made.vllm} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_readme_has_the_table_that_matrix_vllm_toml_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert readme.main(["--check"]) == 0, capsys.readouterr().err


def test_a_table_that_is_not_what_the_toml_says_is_told_and_left_until_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "README.md"
    stale = f"# Ours\n\n{readme.BEGIN}\n\n| 0.1 |\n\n{readme.END}\n\nThe end.\n"
    path.write_text(stale, encoding="utf-8")
    monkeypatch.setattr(readme, "README", path)
    assert readme.main(["--check"]) == 1
    assert "run: python matrix/readme.py" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == stale
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# Ours\n\n{readme.BEGIN}\n\n## Supported releases\n")
    assert text.endswith(f"\n\n{readme.END}\n\nThe end.\n")


@pytest.mark.parametrize("text", ["", readme.BEGIN, readme.END, f"{readme.END} {readme.BEGIN}"])
def test_a_readme_without_the_markers_is_refused_with_the_markers(text: str) -> None:
    with pytest.raises(ValueError, match=f"{readme.BEGIN}\n{readme.END}"):
        readme.update(text, "new")


def test_every_release_has_its_row_newest_first() -> None:
    lines = readme.section(load_matrix(), {}).splitlines()
    known = {r.vllm for r in load_matrix()}
    rows = [cells[1].strip() for cells in (line.split("|") for line in lines if line.startswith("|")) if len(cells) > 1]
    assert [name for name in rows if name in known] == [r.vllm for r in reversed(load_matrix())]


def test_the_cells_of_a_release() -> None:
    assert row(release("1.0", torch="2.8.0")) == ["1.0", "3.10-3.12", "2.8.0", "", "", "", ""]
    proven = {"surface": "2026-01-01", "cpu": "2026-01-02", "gpu": "2026-01-03", "gpu2": "2026-01-04"}
    faults = {"mla": "no MLA", "slow": "slow"}
    preload = ("liba.so.4", "libb.so")
    full = release("1.1", official_torch="2.1.0", proven=proven, faults=faults, preload=preload, note="old")
    assert row(full) == [
        *("1.1", "3.10-3.12", "2.0.0 (2.1.0)", "2026-01-01", "2026-01-02", "2026-01-03, 2026-01-04 (gpu2)"),
        "`mla`, `slow`; wants liba.so.4 and libb.so in `LD_PRELOAD`; old",
    ]
    mixture = release("1.2", no_cpu="nobody built it", proven={"mixture": "2026-01-02"})
    assert row(mixture)[3:] == ["", "2026-01-02 (mixture)", "", "nobody built it"]


def test_a_fault_and_a_kind_of_proof_are_explained_once_below_the_table() -> None:
    rows = [release("1.0", faults={"mla": "no MLA"}), release("1.1", faults={"mla": "no MLA", "a": "b"})]
    text = readme.section(rows, {"cpu": "it ran"})
    assert text.count("no MLA") == 1
    assert text.endswith("- *cpu*: it ran\n\nWhat to know, by name:\n\n- `a`: b\n- `mla`: no MLA\n")
