"""Which of a model's two last states a trainer takes: the one before the final norm, or the one after."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, TypeAlias, get_args

from packaging.version import InvalidVersion, Version

from vllm_compat._detect.speculators import find_speculators
from vllm_compat.errors import UsageError
from vllm_compat.types import NORM, LayerId

__all__ = ["FinalState", "captured_ids", "installed_final_state"]

FinalState: TypeAlias = Literal["pre-norm", "post-norm"]
_FORMAT = "speculators-v1"  # what scripts make of the generator's results


def installed_final_state() -> tuple[FinalState, str]:
    """What the trainer of the installed speculators takes, and why that is said; pre-norm where nothing is known."""
    try:
        installed = version("speculators")
        release = find_speculators(Version(installed))
    except PackageNotFoundError:
        return "pre-norm", "no speculators is installed"
    except InvalidVersion as error:
        return "pre-norm", f"speculators: {error}"
    final = release.formats.get(_FORMAT) if release else None
    if final == "post-norm":
        return "post-norm", f"the trainer of speculators {installed} applies no norm of its own"
    if final == "pre-norm":
        return "pre-norm", f"the trainer of speculators {installed} applies the norm itself"
    return "pre-norm", f"of speculators {installed} nothing is known here"


def captured_ids(layer_ids: Sequence[int], num_layers: int, final_state: FinalState) -> tuple[LayerId, ...]:
    """The state to capture for each layer asked for: the last one, if it is the model's last, as the trainer wants it.

    Raises:
        UsageError: a final state of another name.
    """
    if final_state not in get_args(FinalState):
        raise UsageError(f"final_state is one of {', '.join(get_args(FinalState))}; found {final_state!r}")
    if final_state == "post-norm" and layer_ids[-1] == num_layers - 1:
        return (*layer_ids[:-1], NORM)
    return tuple(layer_ids)
