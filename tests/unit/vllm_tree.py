"""Small source trees that look like vLLM's as far as vllm-compat looks, and the metadata folders beside them.

What differs between releases is a keyword; `without` takes any symbol away, for "a newer vLLM where X is gone".
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

REQUEST_0_11 = (
    "request_id, prompt_token_ids, sampling_params, pooling_params, eos_token_id, client_index=0, block_hasher=None"
)
REQUEST_0_32 = (
    "request_id, prompt_token_ids, sampling_params, pooling_params, client_index=0, block_hasher=None, session_id=None"
)

_EXECUTOR = """
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None): ...
    def execute_model(self, scheduler_output, non_block=False): ...
"""

_SOURCES = {
    "sampling_params": """
        from dataclasses import dataclass, field

        @dataclass(kw_only=True)
        class SamplingParams:
            temperature: float = 1.0
            seed: int | None = None
            max_tokens: int | None = 16
            stop_token_ids: list[int] = field(default_factory=list)
            ignore_eos: bool = False
            detokenize: bool = True

            def __post_init__(self):
                if self.temperature < 0:
                    raise ValueError(f"temperature must be non-negative, got {self.temperature}")
        """,
    "engine/arg_utils": """
        from dataclasses import dataclass

        @dataclass
        class EngineArgs:
            model: str = ""
            enforce_eager: bool = False
            enable_prefix_caching: bool | None = None
            speculative_config: dict | None = None
            worker_extension_cls: str = ""
            async_scheduling: bool | None = None

            def create_engine_config(self, usage_context=None): ...
        """,
    "distributed/parallel_state": """
        def get_tensor_model_parallel_rank():
            return 0

        def get_tensor_model_parallel_world_size():
            return 1
        """,
    "model_executor/layers/vocab_parallel_embedding": "class VocabParallelEmbedding: ...",
    "model_executor/models/interfaces": "class SupportsEagle3: ...",
    "v1/core/sched/interface": """
        from abc import ABC

        class SchedulerInterface(ABC):
            def has_unfinished_requests(self): ...
            def has_requests(self): ...
        """,
    "v1/core/sched/output": """
        from dataclasses import dataclass

        @dataclass
        class NewRequestData:
            req_id: str
            num_computed_tokens: int

        @dataclass
        class CachedRequestData:
            req_ids: list[str]
            num_computed_tokens: list[int]

        @dataclass
        class SchedulerOutput:
            num_scheduled_tokens: dict[str, int]
            total_num_scheduled_tokens: int
        """,
    "v1/engine/__init__": """
        import enum

        class EngineCoreOutput:
            request_id: str
            new_token_ids: list[int]
            finish_reason: "FinishReason | None" = None

        class EngineCoreOutputs:
            outputs: list[EngineCoreOutput] = []
        """,
    "v1/engine/core": """
        from vllm.v1.core.sched.interface import SchedulerInterface
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.executor.abstract import Executor

        class EngineCore:
            def __init__(self, vllm_config, executor_class, log_stats, executor_fail_callback=None):
                self.model_executor = executor_class(vllm_config)
                self.scheduler: SchedulerInterface = Scheduler(vllm_config)
                self.request_block_hasher = None

            def shutdown(self): ...
        """,
    "v1/core/kv_cache_utils": """
        def get_request_block_hasher(block_size, caching_hash_fn): ...
        def init_none_hash(hash_fn): ...
        """,
    "v1/worker/gpu_input_batch": """
        class InputBatch:
            def __init__(self):
                self._req_ids = []

            @property
            def req_ids(self): ...
        """,
    "v1/worker/worker_base": "class WorkerBase: ...",
    "v1/worker/gpu_worker": """
        from vllm.v1.worker.worker_base import WorkerBase

        class Worker(WorkerBase): ...
        """,
    "v1/request": """
        import enum

        class Request:
            def __init__(self, REQUEST_PARAMS):
                self.given = {name: value for name, value in locals().items() if name != "self"}
                self.request_id = request_id

        class RequestStatus(enum.IntEnum):
            WAITING = enum.auto()
            FINISHED_ABORTED = enum.auto()
        """,
    "v1/core/sched/scheduler": """
        from vllm.v1.core.sched.interface import SchedulerInterface

        class Scheduler(SchedulerInterface):
            def schedule(self, SCHEDULE_PARAMS): ...
            def add_request(self, request): ...
            def finish_requests(self, request_ids, finished_status): ...
            def get_grammar_bitmask(self, BITMASK_PARAMS): ...
            def update_from_output(self, scheduler_output, model_runner_output): ...
        """,
}


def write_vllm(
    site: Path,
    *,
    version: str | None = "0.32.0",
    request_params: str = REQUEST_0_32,
    schedule_params: str = "throttle_prefills=False",
    two_phase: bool = True,
    inherits: bool = False,
    v2_runner: bool = True,
    importable: bool = False,
    without: Sequence[str] = (),
    add: Mapping[str, str] | None = None,
) -> Path:
    """Write ``site/vllm`` and return it.

    Args:
        version: what ``_version.py`` says; None for none.
        request_params: of ``Request.__init__``.
        schedule_params: of ``Scheduler.schedule``.
        two_phase: ``Executor.sample_tokens`` exists.
        inherits: the methods of ``Executor`` are those of a base in another module, as in 0.11.
        v2_runner: the V2 model runner exists.
        importable: importing it works; otherwise it raises, so that a test notices.
        without: symbols (``module:Class.member``) or whole modules to leave out.
        add: path below ``vllm`` -> text of further files, or other text for these.
    """
    replacements = {
        "REQUEST_PARAMS": request_params,
        "SCHEDULE_PARAMS": schedule_params,
        "BITMASK_PARAMS": "scheduler_output" if two_phase else "requests, scheduled_spec_decode_tokens",
    }
    sources = {path: _dedent(text) for path, text in _SOURCES.items()}
    for path, text in sources.items():
        for word, params in replacements.items():
            text = text.replace(word, params)
        sources[path] = text
    head = "from abc import ABC\n\nclass {name}({base}):"
    methods = _EXECUTOR + ("    def sample_tokens(self, grammar_output, non_block=False): ...\n" if two_phase else "")
    own = "    @staticmethod\n    def get_class(vllm_config): ...\n"
    if inherits:
        sources["executor/executor_base"] = head.format(name="ExecutorBase", base="ABC") + methods
        importing = "from vllm.executor.executor_base import ExecutorBase\n"
        sources["v1/executor/abstract"] = importing + head.format(name="Executor", base="ExecutorBase") + "\n" + own
    else:
        sources["v1/executor/abstract"] = head.format(name="Executor", base="ABC") + methods + own
    if v2_runner:
        sources["v1/worker/gpu/input_batch"] = "class InputBatch:\n    req_ids: list[str]\n"
    sources["__init__"] = "" if importable else "raise RuntimeError('vllm was imported')\n"
    if version is not None:
        sources["_version"] = VERSION_FILE.format(version=version)
    sources |= {path.removesuffix(".py"): _dedent(text) for path, text in (add or {}).items()}
    for symbol in without:
        _take_out(sources, symbol)
    for path, text in sources.items():
        file = site / "vllm" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for folder in (site / "vllm").glob("**/"):
        (folder / "__init__.py").touch()
    return site / "vllm"


def write_distribution(
    site: Path,
    folder: str,
    *,
    name: str,
    version: str,
    record: Sequence[str] | None = ("vllm/__init__.py",),
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write the metadata folder ``site/folder``; ``record`` None leaves the RECORD out."""
    home = site / folder
    home.mkdir(parents=True)
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    if record is not None:
        (home / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in record), encoding="utf-8")
    for path, text in (files or {}).items():
        (home / path).write_text(text, encoding="utf-8")
    return home


@contextmanager
def importing(site: Path) -> Iterator[None]:
    """``import vllm`` finds the tree in ``site``, and is forgotten afterwards."""
    assert "vllm" not in sys.modules
    sys.path.insert(0, str(site))
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for module in [m for m in sys.modules if m.partition(".")[0] == "vllm"]:
            del sys.modules[module]


def _dedent(text: str) -> str:
    lines = text.lstrip("\n").splitlines()
    margin = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    return "".join(f"{line[margin:]}\n" for line in lines)


def _take_out(sources: dict[str, str], symbol: str) -> None:
    module, _, path = symbol.partition(":")
    key = "/".join(module.split(".")[1:])
    key = key if key in sources else f"{key}/__init__"
    if not path:
        del sources[key]
        return
    name, _, member = path.partition(".")
    tree = ast.parse(sources[key])
    owner = next(n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name)
    if not member:
        tree.body.remove(owner)
    else:
        for body in [owner.body, *(n.body for n in ast.walk(owner) if isinstance(n, ast.FunctionDef))]:
            body[:] = [n for n in body if member not in _names(n)] or [ast.Pass()]
    sources[key] = ast.unparse(tree) + "\n"
    imports = [(n.module or "", a.name) for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    bases = [ast.unparse(base) for base in owner.bases] if isinstance(owner, ast.ClassDef) else []
    for source, base in imports if member else ():
        if source.startswith("vllm.") and base in bases:
            _take_out(sources, f"{source}:{base}.{member}")


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {t.id if isinstance(t, ast.Name) else t.attr for t in targets if isinstance(t, (ast.Name, ast.Attribute))}


VERSION_FILE = """\
# file generated by vcs-versioning
# don't change, don't track in version control
from __future__ import annotations

__all__ = [
    "__version__",
    "__version_tuple__",
    "version",
    "version_tuple",
    "__commit_id__",
    "commit_id",
]

version: str
__version__: str
__version_tuple__: tuple[int | str, ...]
version_tuple: tuple[int | str, ...]
commit_id: str | None
__commit_id__: str | None

__version__ = version = '{version}'
__version_tuple__ = version_tuple = (0, 0, 0)

__commit_id__ = commit_id = 'g0123abc'
"""
