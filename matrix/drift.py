"""The symbols of vLLM that we stand on, recorded for each release; and what a new release moved.

    python matrix/drift.py 0.33.0 [...]     # fetch the official wheel, record it, report the drift
    python matrix/drift.py --report 0.33.0  # the same report from what is recorded
    python matrix/drift.py --unlisted       # the same for each release of the index that the table does not list

A record, `matrix/surface/X.Y.Z.json`, has for each symbol its parameters and the required ones, or null where the
release does not have it. The tests judge every adapter by the records, so they need no vLLM and no network.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_compat._adapters.registry import VARIATIONS, Adapter, behaviours, choose
from vllm_compat._detect.capabilities import CAPABILITIES
from vllm_compat._detect.matrix import load_matrix
from vllm_compat._detect.need import Need
from vllm_compat._detect.surface import Found, Surface

__all__ = ["RECORDS", "Record", "drift", "load", "needs", "record", "report", "unlisted"]

RECORDS = Path(__file__).with_name("surface")


@dataclass(frozen=True)
class Record:
    """One release as it was recorded; ``find`` answers like the source did.

    Raises:
        KeyError: from ``find``, for a symbol that was not looked for then: record the releases anew.
    """

    vllm: str
    symbols: Mapping[str, Mapping[str, list[str]] | None]

    def find(self, symbol: str) -> Found | None:
        """The symbol, or None when this release does not have it."""
        known = self.symbols[symbol]
        return Found(symbol, tuple(known["parameters"]), frozenset(known["required"])) if known is not None else None


def needs() -> Iterator[tuple[str, Need]]:
    """Every need with who has it: the module of ``_adapters``, or ``capabilities``."""
    for variation in VARIATIONS:
        for behaviour in behaviours(variation):
            for need in (*behaviour.needs, *behaviour.unless):
                yield variation, need
    for need in CAPABILITIES.values():
        yield "capabilities", need


def record(vllm: str, package: Path) -> Record:
    """What the source in a package folder has of the symbols that anybody needs."""
    surface = Surface(package)
    symbols: dict[str, Mapping[str, list[str]] | None] = {}
    for symbol in sorted({need.symbol for _, need in needs()}):
        found = surface.find(symbol)
        symbols[symbol] = {"parameters": [*found.parameters], "required": sorted(found.required)} if found else None
    return Record(vllm, symbols)


def load(vllm: str) -> Record:
    """A recorded release."""
    data: dict[str, Any] = json.loads((RECORDS / f"{vllm}.json").read_text(encoding="utf-8"))
    return Record(data["vllm"], data["symbols"])


def recorded() -> list[str]:
    """The recorded releases, oldest first."""
    return sorted((path.stem for path in RECORDS.glob("*.json")), key=Version)


def drift(old: Record, new: Record) -> list[str]:
    """What changed between two releases, a line each."""
    lines = []
    for symbol in sorted(set(old.symbols) & set(new.symbols)):
        was, now = old.find(symbol), new.find(symbol)
        if was and not now:
            lines.append(f"gone      {symbol}")
        elif now and not was:
            lines.append(f"new       {symbol}")
        elif was and now and (was.parameters, was.required) != (now.parameters, now.required):
            lost = [f"-{p}" for p in was.parameters if p not in now.parameters]
            gained = [f"+{p}" for p in now.parameters if p not in was.parameters]
            required = [f"{p} is required now" for p in sorted(now.required - was.required)]
            optional = [f"{p} is optional now" for p in sorted((was.required - now.required) & set(now.parameters))]
            order = [] if lost or gained or required or optional else ["another order"]
            lines.append(f"changed   {symbol}: {', '.join([*lost, *gained, *required, *optional, *order])}")
    return lines


def report(old: Record | None, new: Record, package: Path | None = None) -> str:
    """What moved since the nearest release, which adapter fits, and what there is to write."""
    lines = [f"vLLM {new.vllm}" + (f", compared with {old.vllm}" if old else "")]
    if old:
        lines += [f"  {line}" for line in drift(old, new)] or ["  nothing that we stand on has moved"]
    adapter = choose(new)
    lines.append(f"adapter: {adapter.nearest}")
    if adapter.missing:
        lines.append("NO ADAPTER FITS. Missing, by the behaviour that comes closest:")
        lines += [f"  {line}" for line in _missing(adapter, package)]
    else:
        lines.append("every probe passes; what is left to do:")
        lines.append("  1. a row in matrix/vllm.toml (docs/releases.md, step 3)")
        lines.append(f"  2. nox -s matrix -- {new.vllm} --record")
        lines.append("  3. python matrix/readme.py")
    return "\n".join(lines)


def _missing(adapter: Adapter, package: Path | None) -> Iterator[str]:
    owners = {need.symbol: owner for owner, need in needs() if owner in VARIATIONS}
    for text in adapter.missing:
        symbol = text.partition("(")[0]
        places = ", ".join(_definitions(package, symbol)) if package else ""
        yield f"{text}" + (f"  (that name is now in {places})" if places else "")
        yield f"    wants a behaviour in src/vllm_compat/_adapters/{owners[symbol]}.py"


def _definitions(package: Path, symbol: str) -> list[str]:
    """Modules of a vLLM that define the last name of a symbol."""
    pattern = re.compile(rf"^\s*(?:class|def|async def) {re.escape(re.split(r'[.:]', symbol)[-1])}\b", re.MULTILINE)
    return [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in sorted(package.joinpath("v1").rglob("*.py"))
        if pattern.search(path.read_text(encoding="utf-8", errors="replace"))
    ][:5]


def _fetch(vllm: str, folder: Path) -> Path:
    """The Python files of a release's official wheel, in a folder; the wheel itself, hundreds of megabytes, goes."""
    platforms = [a for n in (35, 31, 28, 24) for a in ("--platform", f"manylinux_2_{n}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", *platforms]
    subprocess.run([*command, "--platform", "manylinux1_x86_64", "-d", str(folder), f"vllm=={vllm}"], check=True)
    wheel = next(folder.glob("vllm-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")])
    wheel.unlink()
    return folder / "vllm"


def unlisted(index: str) -> list[str]:
    """The final releases in pip's words on an index, newer than the table's first and not in it; oldest first."""
    listed = [Version(r.vllm) for r in load_matrix()]
    found = re.search(r"^Available versions: (.*)$", index, re.MULTILINE)
    if not found:
        raise SystemExit(f"pip does not name the versions of vllm:\n{index}")
    there = {Version(text) for text in found[1].split(", ")}
    return [str(v) for v in sorted(there) if v > listed[0] and v not in listed and not v.is_prerelease]


def _index() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Record releases, or report on recorded ones; returns 3 where one has no adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*")
    parser.add_argument("--report", action="store_true", help="from what is recorded; nothing is fetched")
    parser.add_argument("--unlisted", action="store_true", help="releases of the index that the table does not list")
    parser.add_argument("--to", type=Path, metavar="DIR", help="write each report to DIR/RELEASE.txt too")
    options = parser.parse_args(argv)
    releases = [*options.releases, *(unlisted(_index()) if options.unlisted else [])]
    if options.unlisted and not releases:
        print(f"the table lists every release of the index up to {load_matrix()[-1].vllm}")
    elif not releases:
        parser.error("name releases, or --unlisted")
    unserved = False
    for vllm in releases:
        with tempfile.TemporaryDirectory(prefix="vllm-surface-") as folder:
            package = None if options.report else _fetch(vllm, Path(folder))
            new = load(vllm) if package is None else record(vllm, package)
            older = [v for v in recorded() if Version(v) < Version(vllm)]
            words = report(load(older[-1]) if older else None, new, package)
            print(words, flush=True)
            if options.to:
                options.to.mkdir(parents=True, exist_ok=True)
                (options.to / f"{vllm}.txt").write_text(words + "\n", encoding="utf-8")
            unserved |= not all(choose(new).chosen.values())
            if package is not None:
                text = json.dumps({"vllm": vllm, "symbols": new.symbols}, indent=1, sort_keys=True)
                (RECORDS / f"{vllm}.json").write_text(text + "\n", encoding="utf-8")
    return 3 if unserved else 0


if __name__ == "__main__":
    raise SystemExit(main())
