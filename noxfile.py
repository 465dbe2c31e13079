"""The workshop: `nox -l` lists the sessions. The releases of vLLM come from matrix/vllm.toml."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "src"))
from vllm_compat._detect.matrix import Release, load_matrix  # noqa: E402
from vllm_compat._detect.speculators import load_speculators  # noqa: E402

GROUPS = nox.project.load_toml("pyproject.toml")
RELEASES = {r.vllm: r for r in load_matrix() if r.cpu_wheel or r.mixture}
SPECULATORS = {r.version: r for r in load_speculators()}
DEFAULT = "0.16.0"
EAGLE3 = "0.32.0"  # the vLLM that extracts and serves
TRAINER = "0.9.0"  # the speculators that trains
TRAINING = (
    *("--speculator-type", "eagle3", "--on-missing", "raise", "--num-workers", "0"),
    # Flex attention has no backward on a CPU, and the fused losses want Triton.
    *("--draft-attn-impl", "sdpa", "--full-attention-indices", "0", "--loss-implementation", "eager"),
    *("--hidden-states-dtype", "float32", "--draft-vocab-size", "4096", "--total-seq-len", "512"),
    *("--optimizer", "adamw", "--lr", "2e-3", "--scheduler-warmup-ratio", "0.05"),
    *("--epochs", "6", "--checkpoint-freq", "6", "--train-data-ratio", "0.95", "--log-freq", "20"),
)
# States that a head is trained on as if they were the right ones; our layer ids.
MISTAKES: dict[str, tuple[int, ...]] = {"one-later": (3, 16, 28), "another-depth": (1, 7, 12)}
# The right head, served as if it had been trained on other layers; ids in vLLM's convention, none: its default.
CLAIMS: dict[str, tuple[int, ...]] = {
    "none-claimed": (),
    "one-higher": (4, 17, 29),
    "moved": (7, 20, 24),
    "other-depth": (2, 8, 13),
    "first-three": (1, 2, 3),
}
PEERS = ("specforge==0.2.0", "nvidia-modelopt==0.47.0")
PEERS_NEED = (
    "torch==2.10.0",
    "transformers<5",
    "datasets",
    "pydantic",
    "omegaconf",
    "scipy",
    "setuptools<81",
    "pulp",
    "rich",
)
DROPINS = [("0.3.0", DEFAULT), ("0.4.0.1", DEFAULT)]  # speculators, on a vLLM that its own generator cannot use
GENERATOR = "0.4.0.1"  # the last speculators with an engine loop of its own, which the benchmark measures
ABOVE = [
    f"tests/live/test_{name}.py"
    for name in (
        "answers",
        "doctor",
        "inputs",
        "ray_executor",
        "rehearsal",
        "replicas",
        "speculators",
        "verify",
        "worker_processes",
    )
]
KEPT = ("torch==", "transformers==", "huggingface-hub==", "tokenizers==", "numpy==", "safetensors==")
# A CPU needs none of these, and their builds are pinned to indexes that not every machine reaches.
DEBIAN_PACKAGES = {"libtcmalloc_minimal.so.4": "libtcmalloc-minimal4"}
NOT_ON_A_CPU = ("torchvision", "torchaudio", "torchcodec", "triton", "intel_extension_for_pytorch")
# An interpreter is taken from the machine, never downloaded.
os.environ["UV_PYTHON_DOWNLOADS"] = "never"


def _python(accepted: str) -> str | None:
    """The interpreter that runs nox where it is accepted, else the newest one on this machine that is."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = [f"3.{minor}" for minor in range(14, 9, -1)]
    fitting = [p for p in (running, *others) if p in SpecifierSet(accepted)]
    return next((p for p in fitting if p == running or shutil.which(f"python{p}")), fitting[0] if fitting else None)


def _install_group(session: nox.Session, group: str, *options: str) -> None:
    session.install(*options, *nox.project.dependency_groups(GROUPS, group))


def _frozen(session: nox.Session) -> Path:
    """Constraints: what comes on top must leave alone the packages that a vLLM and its models stand on."""
    frozen = Path(session.create_tmp()) / "frozen.txt"
    packages = str(session.run("uv", "pip", "freeze", silent=True, external=True))
    frozen.write_text("\n".join(line for line in packages.splitlines() if line.startswith(KEPT)))
    return frozen


def _install_vllm(session: nox.Session, release: Release) -> None:
    """The CPU build of a release, with the first torch that can be had: PyTorch's CPU build, one that lies on this
    machine (PIP_FIND_LINKS), or PyPI's CUDA build, whose CPU half the kernels run on just as well.
    """
    overrides = Path(session.create_tmp()) / "overrides.txt"
    dropped = [f"{name}; sys_platform == 'never'" for name in NOT_ON_A_CPU]
    wanted = (release.cpu_wheel, *release.with_it)
    on_this_machine = os.environ.get("PIP_FIND_LINKS", "")
    ways = [
        ("PyTorch's CPU build", [], ["--torch-backend", "cpu"]),
        *([("a torch on this machine", [], ["--find-links", on_this_machine])] if on_this_machine else []),
        ("PyPI's CUDA build", [f"torch=={release.torch}"], []),
    ]
    for name, pins, options in ways:
        overrides.write_text("\n".join([*dropped, *pins, *release.with_it]))
        try:
            session.install("--override", str(overrides), *options, *wanted, silent=True)
        except CommandFailed:
            if name == ways[-1][0]:
                raise
            session.log(f"torch for vLLM {release.vllm}: {name} cannot be had here")
        else:
            session.log(f"torch for vLLM {release.vllm}: {name}")
            break
    if release.without_dependencies:
        session.install("--no-deps", *release.without_dependencies)


def _install_files(session: nox.Session, release: Release) -> Path:
    """A mixture without its kernels: the files of one wheel amid all that the CPU build of another release brings.

    Returns:
        The folder in which that build's kernels wait for ``_add_kernels``.
    """
    neighbour = RELEASES[release.kernels_of]
    _install_vllm(session, neighbour)
    waiting = Path(session.create_tmp()) / "kernels"
    shutil.rmtree(waiting, ignore_errors=True)
    waiting.mkdir()
    for kernels in _vllm(session).glob("_C*.so"):
        shutil.copy2(kernels, waiting)
    session.run("uv", "pip", "uninstall", Requirement(neighbour.cpu_wheel).name, external=True, silent=True)
    session.install("--no-deps", release.mixture, *release.with_it)
    return waiting


def _add_kernels(session: nox.Session, waiting: Path) -> None:
    for kernels in sorted(waiting.iterdir()):
        place = _vllm(session) / kernels.name
        place.unlink(missing_ok=True)  # a hard link into uv's cache: written to, it would change for everybody
        shutil.copy2(kernels, place)
        session.log(f"kernels of another release: {kernels.name}")


def _vllm(session: nox.Session) -> Path:
    """The folder that ``import vllm`` loads in the session's environment."""
    return next(Path(session.virtualenv.location).glob("lib/python3*/site-packages/vllm"))


def _install_speculators(session: nox.Session, version: str) -> None:
    """speculators beside a vLLM. It pins packages of its time, and runs on those that this vLLM stands on."""
    frozen, overrides = _frozen(session), Path(session.create_tmp()) / "speculators.txt"
    dropped = [f"{n}; sys_platform == 'never'" for n in (*NOT_ON_A_CPU, *SPECULATORS[version].without)]
    kept = [
        line for line in frozen.read_text().splitlines() if line.startswith(("torch==", "transformers==", "numpy=="))
    ]
    overrides.write_text("\n".join([*dropped, *kept]))
    session.install("--override", str(overrides), "--constraint", str(frozen), f"speculators=={version}")


def _install_ourselves(session: nox.Session) -> None:
    _install_group(session, "live")
    session.install("--no-deps", *nox.project.dependency_groups(GROUPS, "model"))
    session.install(".[extract]")


def _environment(session: nox.Session, release: Release) -> dict[str, str]:
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **release.environment}
    env["PYTHONDONTWRITEBYTECODE"] = ""  # where it is set, each process that a test starts compiles all of vLLM again
    if release.preload:
        env["LD_PRELOAD"] = ":".join(str(_library(session, name)) for name in release.preload)
    return env


def _library(session: nox.Session, name: str) -> Path:
    """A shared library that a CPU build insists on: out of the environment, the system, or Debian's package of it."""
    places = [Path(session.virtualenv.location), *map(Path, ("/usr/lib", "/usr/local/lib", "/opt/homebrew/lib"))]
    found = next((f for place in places for f in sorted(place.rglob(name))), None)
    if found is None and name in DEBIAN_PACKAGES and shutil.which("apt-get"):
        with session.chdir(session.create_tmp()):
            session.run("apt-get", "download", DEBIAN_PACKAGES[name], external=True, silent=True)
            (archive,) = Path().glob(f"{DEBIAN_PACKAGES[name]}_*.deb")
            session.run("dpkg-deb", "-x", str(archive), session.virtualenv.location, external=True)
        found = next(iter(Path(session.virtualenv.location).rglob(name)), None)
    if found is None:
        session.error(f"{name} is wanted in LD_PRELOAD and is not on this machine; install {DEBIAN_PACKAGES.get(name)}")
    return found


@nox.session(python=_python(RELEASES[DEFAULT].python))
def demo(session: nox.Session) -> None:
    """The main job, for real: SmolLM2's hidden states out of vLLM 0.16.0 on the CPU, compared with HF transformers."""
    release = RELEASES[DEFAULT]
    _install_vllm(session, release)
    _install_ourselves(session)
    output = ROOT / "demo-output"
    model, prepared, states = output / "smollm2", output / "tokenized_data.jsonl", output / "states"
    shutil.rmtree(states, ignore_errors=True)
    session.run("python", "demo/smollm2.py", str(model))
    session.run("python", "demo/prepare.py", str(model), str(prepared))
    session.run(
        *("python", "-m", "vllm_compat.extract", "--model-path", str(model), "--prepared-data", str(prepared)),
        *("--output-dir", str(states), "--batch-size", "8", "--max-seq-len", "256", "--tp-size", "1"),
        *("--layer-ids", "2", "15", "27", "29"),
        env=_environment(session, release) | {"VLLM_LOGGING_LEVEL": "WARNING"},
    )
    session.run(
        *("python", "demo/compare.py", "--model", str(model), "--prepared", str(prepared), "--states", str(states)),
        env=_environment(session, release),
    )


@nox.session(python=_python(RELEASES[DEFAULT].python))
def tests(session: nox.Session) -> None:
    """All tests that need no vLLM, then the live suite on vLLM 0.16.0."""
    _install_group(session, "test")
    session.install("-e", ".")
    session.run("pytest", *session.posargs)
    session.notify(f"live({DEFAULT})", ["--keep"])


@nox.session
@nox.parametrize("python,release", [nox.param(_python(r.python), name, id=name) for name, r in RELEASES.items()])
def live(session: nox.Session, release: str) -> None:
    """The live suite on one release: [--keep] its environment (gigabytes), [--report DIR], [--ray] with Ray; the rest
    is pytest's.
    """
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--keep", action="store_true")
    own.add_argument("--ray", action="store_true")
    own.add_argument("--report", type=Path)
    options, arguments = own.parse_known_args(session.posargs)
    report: Path | None = options.report
    try:
        if RELEASES[release].mixture:
            waiting = _install_files(session, RELEASES[release])
            _install_ourselves(session)
            env = _environment(session, RELEASES[release])
            session.run("pytest", "tests/parts", env=env)  # the release itself, before anything foreign is in it
            _add_kernels(session, waiting)
        else:
            _install_vllm(session, RELEASES[release])
            _install_ourselves(session)
            env = _environment(session, RELEASES[release])
        if options.ray:
            session.install("--constraint", str(_frozen(session)), ".[extract,ray]")
        written = []
        if report:
            packages = session.run("uv", "pip", "freeze", silent=True, external=True)
            (report / f"{release}.packages").write_text(str(packages))
            written = [f"--junitxml={report / f'{release}.xml'}"]
        if report and arguments:
            (report / f"{release}.partial").touch()
        if not (report or arguments):
            _install_group(session, "torch", "--constraint", str(_frozen(session)))
            session.run("pytest", "tests/unit")  # some of them need a torch, and were skipped without
        # The matrix proves the contract; what stands on it is tested on the default release.
        contract = ["tests/live", *(f"--ignore={test}" for test in ABOVE if report)]
        session.run("pytest", *(arguments or contract), *written, env=env)
    finally:
        if not options.keep:
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session
def matrix(session: nox.Session) -> None:
    """The live suite on many releases, and a table at the end: nox -s matrix -- --oldest --newest (or --help)."""
    _install_group(session, "matrix")
    session.install("-e", ".")
    session.run("python", "-m", "matrix.run", *session.posargs)


@nox.session
@nox.parametrize("python,release", [nox.param(_python(r.python), name, id=name) for name, r in SPECULATORS.items()])
def formats(session: nox.Session, release: str) -> None:
    """Our formats, read by a release of speculators itself: [--keep] its environment; the rest is pytest's."""
    row = SPECULATORS[release]
    arguments = [a for a in session.posargs if a != "--keep"] or ["tests/formats"]
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("\n".join(f"{n}; sys_platform == 'never'" for n in (*NOT_ON_A_CPU, *row.without)))
    wanted = ("--override", str(overrides), f"speculators=={row.version}", *row.needs)
    try:
        try:
            session.install("--torch-backend", "cpu", *wanted, silent=True)
        except CommandFailed:
            session.log("PyTorch's CPU build cannot be had here; PyPI's CUDA build reads files just as well")
            session.install(*wanted)
        _install_group(session, "formats")
        session.install(".[extract]")
        session.run("pytest", *arguments)
    finally:
        if "--keep" not in session.posargs:
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session
def peers(session: nox.Session) -> None:
    """Our files, read by the code of SpecForge and ModelOpt, each installed without what it brings for training."""
    _install_group(session, "test")
    try:
        session.install("--torch-backend", "cpu", *PEERS_NEED, silent=True)
    except CommandFailed:
        session.install(*PEERS_NEED)
    session.install("--no-deps", *PEERS)
    session.install("-e", ".[extract]")
    session.run("pytest", *(session.posargs or ["tests/unit/formats/test_formats_peers.py"]))


@nox.session
@nox.parametrize(
    "python,speculators,release",
    [nox.param(_python(RELEASES[v].python), s, v, id=f"{s}, vLLM {v}") for s, v in DROPINS],
)
def dropin(session: nox.Session, speculators: str, release: str) -> None:
    """A script for speculators' own generator, run with ours: [--keep] the environment; the rest is pytest's."""
    arguments = [a for a in session.posargs if a != "--keep"] or ["tests/dropin"]
    try:
        _install_vllm(session, RELEASES[release])
        _install_ourselves(session)
        _install_speculators(session, speculators)
        session.run("pytest", *arguments, env=_environment(session, RELEASES[release]))
    finally:
        if "--keep" not in session.posargs:
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


def _install_trainer(session: nox.Session, torch: str) -> str:
    """speculators in an environment of its own, with the torch that vLLM has: the interpreter of it."""
    row = SPECULATORS[TRAINER]
    place = Path(session.create_tmp()).resolve() / "trainer"
    python, overrides = str(place / "bin" / "python"), place.with_suffix(".txt")
    without = [f"{name}; sys_platform == 'never'" for name in (*NOT_ON_A_CPU, *row.without)]
    overrides.write_text("\n".join([*without, f"torch=={torch}"]))
    on_this_machine = os.environ.get("PIP_FIND_LINKS", "")
    ways = [
        ["--torch-backend", "cpu"],
        *([["--find-links", on_this_machine]] if on_this_machine else []),
        [],  # PyPI's CUDA build, whose CPU half trains just as well
    ]
    session.run_install(
        "uv", "venv", "--clear", "--python", str(session.python), str(place), external=True, silent=True
    )
    install = ("uv", "pip", "install", "--python", python, "--override", str(overrides))
    for options in ways:
        try:
            session.run_install(*install, *options, f"speculators=={row.version}", external=True, silent=True)
        except CommandFailed:
            if not options:
                raise
            session.log(f"speculators {row.version}: not with {' '.join(options)}")
        else:
            break
    return python


@nox.session(python=_python(RELEASES[EAGLE3].python))
def eagle3(session: nox.Session) -> None:
    """The road on a CPU, most of an hour: answers and states, heads that speculators trains, their acceptance."""
    release = RELEASES[EAGLE3]
    _install_vllm(session, release)
    _install_ourselves(session)
    session.install(".[arrow]")
    session.install("--no-deps", *nox.project.dependency_groups(GROUPS, "eagle3"))
    trainer = _install_trainer(session, release.torch)
    env = _environment(session, release) | {"VLLM_LOGGING_LEVEL": "WARNING"}
    env["LD_PRELOAD"] = str(_library(session, "libiomp5.so"))  # without it, says vLLM, speculating on a CPU is slow

    output = ROOT / "eagle3-output"
    model, prompts, states = (output / name for name in ("smollm2", "prompts", "right"))
    shutil.rmtree(output, ignore_errors=True)
    session.run("python", "demo/smollm2.py", str(model))
    session.run("python", "benchmarks/eagle3/prompts.py", str(prompts))
    extract = (
        *("python", "-m", "vllm_compat.extract", "--model-path", str(model), "--format", "speculators"),
        *("--batch-size", "32", "--max-seq-len", "256", "--overlong", "skip"),
    )
    session.run(
        *(*extract, "--prepared-data", str(prompts / "train.jsonl"), "--generate", "128"),
        *("--layer-ids", "2", "15", "27", "29", "--output-dir", str(states)),
        env=env,
    )
    # Mistakes to compare with: the same answers, and states of other layers. A run is an input, too.
    for name, ids in MISTAKES.items():
        session.run(
            *(*extract, "--prepared-data", str(states), "--output-dir", str(output / name)),
            *("--layer-ids", *map(str, ids), "29"),
            env=env,
        )
    claimed = json.loads((states / "draft_config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    folders = {name: output / name for name in ("right", *MISTAKES)}
    trained = {name: output / "heads" / name for name in folders}
    for name, head in trained.items():
        session.run(
            *(trainer, "benchmarks/eagle3/train.py", *TRAINING, "--verifier-name-or-path", str(model)),
            *("--target-layer-ids", *map(str, claimed)),  # what serving will go by, whatever the states are of
            *("--data-path", str(folders[name]), "--save-path", str(head)),
            env={"HF_HUB_OFFLINE": "1"},
            external=True,
        )

    served = {name: head / "checkpoint_best" for name, head in trained.items()}
    copies = [(name, "right", ids) for name, ids in CLAIMS.items()]
    for name, of, ids in [*copies, ("one-later, corrected", "one-later", tuple(k + 1 for k in claimed))]:
        copy = output / "heads" / name.replace(", ", "-")
        relabel = ("python", "benchmarks/eagle3/relabel.py", str(served[of]), str(copy))
        session.run(*relabel, *(("--layer-ids", *map(str, ids)) if ids else ()))
        served[name] = copy
    session.run(
        *("python", "benchmarks/eagle3/acceptance.py", "--model", str(model), "--batch-size", "20"),
        *("--prompts", str(prompts / "held-out.jsonl"), "--out", str(output / "acceptance.json")),
        *(part for name, head in served.items() for part in ("--head", f"{name}={head}")),
        env=env,
    )
    session.run(
        *("python", "benchmarks/eagle3/report.py", "--run", str(states)),
        *(part for name, head in trained.items() for part in ("--trained", f"{name}={head}")),
        *("--acceptance", str(output / "acceptance.json"), "--out", str(output / "eagle3-cpu.json")),
    )


@nox.session(python=_python(RELEASES[DEFAULT].python))
def bench(session: nox.Session) -> None:
    """Speed against vLLM's own prefill: [--release R], [--keep] the environment; the rest is the benchmark's."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--release", default=DEFAULT, choices=RELEASES)
    own.add_argument("--keep", action="store_true")
    options, arguments = own.parse_known_args(session.posargs)
    release = RELEASES[options.release]
    if str(session.python) not in SpecifierSet(release.python):
        session.error(f"vLLM {release.vllm} takes Python {release.python}, and this session has {session.python}")
    try:
        if release.mixture:
            waiting = _install_files(session, release)
            _install_ourselves(session)
            _add_kernels(session, waiting)
        else:
            _install_vllm(session, release)
            _install_ourselves(session)
        if release.vllm in SpecifierSet(SPECULATORS[GENERATOR].vllm):
            _install_speculators(session, GENERATOR)
        session.install("--constraint", str(_frozen(session)), ".[extract,picture]")
        # The logs of the engines go to files beside the result.
        session.run("python", "-m", "benchmarks.bench", *arguments, env=_environment(session, release))
    finally:
        if not options.keep:
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session
def crash(session: nox.Session) -> None:
    """An extraction killed a thousand times at random moments, and resumed each time."""
    _install_group(session, "test")
    session.install("-e", ".")
    session.run("pytest", "tests/unit/extract/test_extract_crash.py", env={"VLLM_COMPAT_KILLS": "1000"})


@nox.session
def ray(session: nox.Session) -> None:
    """Replicas on a local Ray cluster, with made-up engines; the live one is tests/live/test_replicas.py."""
    _install_group(session, "test")
    session.install("-e", ".[ray]")
    session.run("pytest", "tests/unit/extract/test_replicas_ray.py", *session.posargs)


@nox.session
def surface(session: nox.Session) -> None:
    """Fetch releases of vLLM, record what we stand on, and report what moved: nox -s surface -- 0.34.0."""
    session.install("pip", "-e", ".")
    session.run("python", "matrix/drift.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format; and the workflow files by their schema."""
    _install_group(session, "lint")
    session.run("ruff", "check", "--no-cache", *session.posargs)
    session.run("ruff", "format", "--check")
    workflows = sorted(map(str, Path(".github/workflows").glob("*.yml")))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict, and pyright, over the package and everything around it."""
    _install_group(session, "types")
    session.install("-e", ".[extract]", "nox")
    session.run("mypy")
    session.run("pyright")
