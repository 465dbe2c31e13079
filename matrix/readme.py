"""README's table of supported releases, written from matrix/vllm.toml.

python matrix/readme.py          # write it
python matrix/readme.py --check  # exit code 1 where README.md has another
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet

from vllm_compat._detect.matrix import Release, load_matrix, load_proofs

__all__ = ["BEGIN", "END", "README", "main", "section", "update"]

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- Supported releases: written by matrix/readme.py from matrix/vllm.toml -->"
END = "<!-- end of supported releases -->"

_SECTION = """\
## Supported releases

Newest first. Every other build, nightlies and forks included, is judged by the same probes. A date is that of the last
run that passed. *Python*: what vLLM's wheels accept, from our own 3.10 on. *torch*: what the CPU build pins; in
brackets, what the official wheel pins where that is another.

| vLLM | Python | torch | surface | live: cpu | live: gpu | what to know |
|---|---|---|---|---|---|---|
{rows}

{proofs}

What to know, by name:

{faults}
"""


def section(releases: Sequence[Release], proofs: Mapping[str, str]) -> str:
    """The section, without the markers."""
    faults = {name: words for release in releases for name, words in release.faults.items()}
    return _SECTION.format(
        rows="\n".join(f"| {' | '.join(_cells(release))} |" for release in reversed(releases)),
        proofs="\n".join(f"- *{kind}*: {words}" for kind, words in proofs.items()),
        faults="\n".join(f"- `{name}`: {words}" for name, words in sorted(faults.items())),
    )


def _cells(release: Release) -> tuple[str, ...]:
    pythons = [v for v in (f"3.{minor}" for minor in range(10, 30)) if v in SpecifierSet(release.python)]
    torch = release.torch + (f" ({release.official_torch})" if release.official_torch else "")
    surface, cpu, gpu = _date(release, "surface"), _date(release, "cpu", "mixture"), _date(release, "gpu", "gpu2")
    return release.vllm, f"{pythons[0]}-{pythons[-1]}", torch, surface, cpu, gpu, _to_know(release)


def _date(release: Release, usual: str, other: str = "") -> str:
    """The date of the usual kind of proof, then that of the other kind with its name."""
    dates = [release.proven.get(usual, ""), f"{release.proven[other]} ({other})" if other in release.proven else ""]
    return ", ".join(filter(None, dates))


def _to_know(release: Release) -> str:
    faults = ", ".join(f"`{name}`" for name in release.faults)
    preload = f"wants {' and '.join(release.preload)} in `LD_PRELOAD`" if release.preload else ""
    return "; ".join(filter(None, [release.no_cpu, faults, preload, release.note]))


def update(text: str, new: str) -> str:
    """A README with ``new`` in place of what stands between the markers.

    Raises:
        ValueError: it has no such markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks a marker; it wants these two lines:\n{BEGIN}\n{END}")
    return f"{before}{BEGIN}\n\n{new}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the section, or check it; returns 1 where the check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check: bool = parser.parse_args(argv).check
    old = README.read_text(encoding="utf-8")
    new = update(old, section(load_matrix(), load_proofs()))
    if check and new != old:
        print("README.md's table is not what matrix/vllm.toml says; run: python matrix/readme.py", file=sys.stderr)
        return 1
    if not check:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
