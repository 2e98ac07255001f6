"""Typed errors: every one names the object, what was expected, what was found and what to do."""

from __future__ import annotations

from pathlib import Path


class MlxStreamError(Exception):
    """Base of all errors a user can cause or meet.

    Args:
        problem: one sentence saying what is wrong.
        file: the file concerned, if any.
        tensor: the tensor or module concerned, if any.
        expected: what a valid input would have had.
        actual: what was found.
        remedy: the next step for the user.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        expected: object = None,
        actual: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.expected = expected
        self.actual = actual
        self.remedy = remedy
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.problem]
        for label, value in (
            ("file", self.file),
            ("tensor", self.tensor),
            ("expected", self.expected),
            ("actual", self.actual),
        ):
            if value is not None:
                parts.append(f"  {label}: {value}")
        if self.remedy:
            parts.append(f"  what to do: {self.remedy}")
        return "\n".join(parts)


class CheckpointError(MlxStreamError):
    """The checkpoint folder cannot be used as it is."""


class HeaderError(CheckpointError):
    """A safetensors header is malformed, too large, or contradicts its file."""


class TruncatedFileError(CheckpointError):
    """A tensor's byte range ends past the end of its file."""


class MissingTensorError(CheckpointError):
    """A tensor the model needs is in no file of the checkpoint."""


class TensorFormatError(CheckpointError):
    """A tensor has a dtype or shape other than the model needs."""


class ExpertCountError(CheckpointError):
    """The stacked expert tensors disagree with the config or with each other on E."""


class DenseModelError(CheckpointError):
    """The checkpoint has no routed experts, so there is nothing to stream."""


class FileChangedError(CheckpointError):
    """A file was replaced or modified after its header was read."""


class UnsupportedModelError(CheckpointError):
    """The architecture or tensor layout is not one this release can stream."""


class UnstackedExpertsError(UnsupportedModelError):
    """Experts in the Hugging Face layout, which ``mlx_stream pack`` rewrites."""


class UnsupportedQuantizationError(CheckpointError):
    """The quantization mode, bit width or group size is not supported."""


class PackedLayoutError(CheckpointError):
    """A packed folder's manifest is malformed, or contradicts its files."""


class DamagedRecordError(CheckpointError):
    """An expert's bytes are not those that were packed: its checksum differs."""


class PrerouterError(CheckpointError):
    """A Prerouter's spec or heads cannot be used, or not with this model."""


class AdapterError(CheckpointError):
    """An adapter's file cannot be used, or not with this model."""


class PackError(MlxStreamError):
    """A checkpoint cannot be packed, verified or repaired as asked."""


class ReadError(MlxStreamError):
    """The operating system failed a read (EIO and the like)."""


class EndOfFileError(ReadError):
    """A read ended before its range did: the file is shorter than its header says."""


class ReadCancelled(MlxStreamError):
    """A read was abandoned because its request was cancelled or the reader closed."""


class BudgetError(MlxStreamError):
    """The memory budget cannot hold the plan; the message says which change would fit."""


class CapabilityError(MlxStreamError):
    """The chosen backend lacks a capability; the message names it."""


class RendezvousError(MlxStreamError):
    """The chunks of a prompt did not meet at the same expert layer."""


class ModelNotFoundError(MlxStreamError):
    """The model is neither a local folder nor an available hub repository."""


class HubError(MlxStreamError):
    """The hub refused, did not answer, or answered with what cannot be used."""


class HubEntryError(HubError):
    """The repository is there, the file in it is not."""


class HeadersOnlyError(CheckpointError):
    """Only the headers of a hub repository are here; its weights cannot be read."""


class KvCacheError(MlxStreamError):
    """The model, or a prompt cache, cannot do what was asked of the KV cache."""


class ResumeError(MlxStreamError):
    """A prefill cannot be checkpointed or resumed: foreign, stale or damaged files, no room."""


class PromptFileError(MlxStreamError):
    """A prompt cache file is damaged, of another model, or cannot be written."""
