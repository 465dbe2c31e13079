"""From an engine's states to a committed sample."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_compat.errors import NonFiniteError
from vllm_compat.extract.config import OnNonFinite
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.journal import Entry
from vllm_compat.extract.maker import SampleMaker
from vllm_compat.extract.store import Store
from vllm_compat.types import CapturedStates

__all__ = ["SampleWriter"]


@dataclass(frozen=True, slots=True)
class SampleWriter:
    """Checks samples and commits them.

    Attributes:
        store: where they go.
        maker: checks them.
        on_nonfinite: what a state that is not finite does.
    """

    store: Store
    maker: SampleMaker
    on_nonfinite: OnNonFinite

    def write(self, sample: Sample, states: CapturedStates) -> Entry | None:
        """Check the states and commit the sample. After the first error nothing more is committed: None is returned.

        Raises:
            CaptureError: the states are not the sample's, or not finite.
            StorageError: the file system refused.
        """
        try:
            return self._write(sample, states)
        except BaseException:
            self.store.refuse()
            raise

    def _write(self, sample: Sample, states: CapturedStates) -> Entry | None:
        sampled = states.output_token_ids[-1] if states.output_token_ids else None
        try:
            data = self.maker.make(sample, states)
        except NonFiniteError as error:
            if self.on_nonfinite == "fail":
                raise NonFiniteError(f"{error}. --on-nonfinite skip leaves such samples out and names them") from error
            tokens = len(states.token_ids)
            why = f"nonfinite: {error.__cause__}"
            return self.store.skip(Entry(sample.index, "", 0, "", tokens, sampled, sample.id, skipped=why))
        return self.store.commit(data, sampled)
