"""A run in small before the model loads: its first layers with weights that are made up, through the whole path.

What cannot work fails here, within the first minute, and not after the load. It happens in a process of its own (see
``stage``), so that GPU memory and vLLM's state are as before; its files have a folder of their own, beside that of the
run, on the same file system, and removed at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vllm_compat.errors import StepError, VllmCompatError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.files import storage
from vllm_compat.extract.locks import LOCK_FILE, is_locked, locked_folder
from vllm_compat.extract.plan import Plan
from vllm_compat.types import LayerId

__all__ = ["TIMEOUT_S", "Rehearsal", "RehearsalError", "rehearse", "spec_of"]

TIMEOUT_S = 900.0
"""Most take less than one; kernels that are compiled at their first use, or a slow file system, take minutes."""
_TELL_EVERY_S = 60.0
_STAGE = "vllm_compat.extract.stage"
_LAST_LINES = 40
_GROUP_END_S = 10.0

logger = logging.getLogger(__name__)


class RehearsalError(VllmCompatError):
    """The rehearsal failed, and so would the run; nothing was loaded.

    Attributes:
        exit_code: that of the error that ended it. A step that failed has 1 and not 75: the same command would fail
            again.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        vars(self)["exit_code"] = exit_code


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A rehearsal that went well.

    Attributes:
        num_layers: layers that were built.
        of: layers of the model.
        layer_ids: what was captured of those that were built, in the order of the run's own ids.
        unseen: kinds of layers that the model has further on, and which were not built.
        samples: that were extracted, and read back but for ``nonfinite``.
        tokens: of all of them.
        longest: tokens of the longest.
        chunked: whether that one took more than a step.
        nonfinite: samples whose states were not finite, so that they have no file.
        seconds_to_open: from the start to the open engine, vLLM's import left out.
        seconds_to_extract: from there to the last comparison.
        seconds: all of it, start and end of the process too.
    """

    num_layers: int
    of: int
    layer_ids: tuple[LayerId, ...]
    unseen: tuple[str, ...]
    samples: int
    tokens: int
    longest: int
    chunked: bool
    nonfinite: int
    seconds_to_open: float
    seconds_to_extract: float
    seconds: float

    def __str__(self) -> str:
        chunked = ", that one in several steps" if self.chunked else ""
        return (
            f"{self.num_layers} of {self.of} layers, {self.samples} samples of 1 to {self.longest} tokens{chunked}, "
            f"written, read back and compared: {self.seconds:.0f} s"
        )


def rehearse(config: ExtractConfig, plan: Plan, *, timeout_s: float = TIMEOUT_S) -> Rehearsal | None:
    """Rehearse a run; the log tells of it. None, and a warning, where a rehearsal cannot be made.

    Args:
        config: of the run.
        plan: of the run; its output folder is there.
        timeout_s: seconds after which it is given up.

    Raises:
        RehearsalError: it failed, or took too long.
        StorageError: the folder beside the run's cannot be made.
    """
    spec = spec_of(config, plan)
    try:
        json.dumps(spec)
    except (TypeError, ValueError) as error:
        _warn(f"the settings cannot be told to another process: {error}")
        return None
    logger.info("rehearsal: the first layers of the model with made-up weights, before it is loaded (--no-rehearsal)")
    start = time.monotonic()
    with _folder(plan.output_dir) as folder, tempfile.TemporaryFile() as log:
        told = _play(json.dumps(spec | {"folder": str(folder)}), log, timeout_s)
    if "uncut" in told:
        _warn(told["uncut"])
        return None
    told |= {name: tuple(told[name]) for name in ("layer_ids", "unseen")}
    done = Rehearsal(**told, seconds=time.monotonic() - start)
    logger.info("rehearsal: %s", done)
    for text in done.unseen:
        logger.warning("rehearsal: what the model has further on was not built: %s", text)
    if done.nonfinite:
        logger.warning(
            "rehearsal: the states of %d of %d samples are not finite, which is no wonder with made-up weights; they "
            "were not written",
            done.nonfinite,
            done.samples,
        )
    return done


def spec_of(config: ExtractConfig, plan: Plan) -> dict[str, Any]:
    """What the other process is told."""
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {
        "config": settings | {name: os.fspath(settings[name]) for name in ("prepared_data", "output_dir")},
        "layer_ids": plan.layer_ids,
        "max_model_len": plan.max_model_len,
        "longest": plan.input.longest,
    }


def _warn(why: str) -> None:
    logger.warning("NO REHEARSAL: %s. What cannot work will show only after the model is loaded", why)


def _play(spec: str, log: IO[bytes], timeout_s: float) -> dict[str, Any]:
    """What the process tells.

    Raises:
        RehearsalError: an error, nothing, or nothing in time.
    """
    with subprocess.Popen(
        [sys.executable, "-m", _STAGE],
        bufsize=0,
        stdin=subprocess.PIPE,  # open until this process ends: the other ends with it
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it is dead, and its log says why
                child.stdin.write(spec.encode() + b"\n")
            _wait(child, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise _failed(f"it took more than {timeout_s:g} s and was ended", log=log) from error
        finally:
            _end_group(child)
        told = child.stdout.read()
    if not told:
        raise _failed(f"its process ended with {_status(child.returncode)}", log=log)
    found: dict[str, Any] = json.loads(told)
    if "error" in found:
        raise _told(found, log)
    if child.returncode:
        logger.warning("rehearsal: all went well, and then its process ended with %s", _status(child.returncode))
    return found


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    start = time.monotonic()
    while (left := start + timeout_s - time.monotonic()) > _TELL_EVERY_S:
        try:
            child.wait(_TELL_EVERY_S)
        except subprocess.TimeoutExpired:
            logger.info("rehearsal: still at it after %.0f s", time.monotonic() - start)
        else:
            return
    child.wait(max(left, 0))


def _told(found: Mapping[str, Any], log: IO[bytes]) -> RehearsalError:
    ours = found["exit_code"] is not None
    step = found["exit_code"] == StepError.exit_code
    text = found["error"] if ours else f"{found['kind']}: {found['error']}"
    return _failed(text, log=log if step or not ours else None, exit_code=1 if step or not ours else found["exit_code"])


def _failed(why: str, *, log: IO[bytes] | None, exit_code: int = 1) -> RehearsalError:
    if log:
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").splitlines()[-_LAST_LINES:]
        logger.error("the last lines of the rehearsal:\n%s", "\n".join(f"  | {line}" for line in lines))
    return RehearsalError(
        f"the rehearsal with the model's first layers failed: {why.rstrip('.')}. Nothing was loaded and no sample was "
        "touched. --no-rehearsal goes without",
        exit_code=exit_code,
    )


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the process and its workers, and wait until they are gone: until then they may hold GPU memory."""
    end = time.monotonic() + _GROUP_END_S
    while time.monotonic() < end:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        except PermissionError:  # some systems say so of a group of the dead
            break
        child.poll()
        time.sleep(0.05)
    child.wait()


@contextlib.contextmanager
def _folder(output_dir: Path) -> Generator[Path, None, None]:
    """A folder beside the run's, on its file system; removed at the end, together with what killed processes left.

    Where the run's folder is the only one of its file system, or the one above cannot be written, it is in that, and
    hidden; no sample's name is below it in either case.
    """
    place, begin = output_dir.resolve(), ".vllm-compat-rehearsal-"
    above = place.parent
    if above.stat().st_dev == place.stat().st_dev and os.access(above, os.W_OK | os.X_OK):
        place, begin = above, f".{place.name}.rehearsal-"
    for old in place.iterdir():
        if old.name.startswith(begin) and (old / LOCK_FILE).exists() and not is_locked(old / LOCK_FILE):
            shutil.rmtree(old, ignore_errors=True)
    with storage(place, "written"):
        folder = Path(tempfile.mkdtemp(prefix=begin, dir=place))
    try:
        with locked_folder(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
