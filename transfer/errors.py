"""The one exception tree of pdserve.

    PdserveError
    ├── ConfigError            a flag or file that cannot work: one line, exit code 2
    │   ├── CheckpointError    the model directory or file cannot be loaded
    │   └── UnsupportedModel   a model class that paged attention cannot serve
    ├── ProtocolError          a frame that is not a valid message (counted, dropped)
    ├── LayoutMismatch         two workers whose KV cannot be exchanged, naming the fields
    ├── RegistrationRefused    a gateway or peer said no, and why: exit code 3
    ├── TransferError          one attempt's KV is unusable (gap, bad checksum, deadline)
    ├── RingUnavailable        two ends that cannot share memory, and why: the slower link is used, or none
    ├── OutOfBlocks            an allocation that does not fit right now (retry after something is freed)
    └── StepCancelled          every request of the running step was cancelled
"""


class PdserveError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(PdserveError):
    """A flag, file or environment that cannot work; its text is the one line shown to the user."""


class CheckpointError(ConfigError):
    """A model directory or file that is missing, incomplete or corrupt."""


class UnsupportedModel(ConfigError):
    """A model that cannot be served by paged attention, named with the reason."""


class ProtocolError(PdserveError):
    """A frame that is not a valid message; `reason` labels the metric."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class LayoutMismatch(PdserveError):
    """Two ends whose KV layouts differ; the text names each field with both values."""


class RegistrationRefused(PdserveError):
    """The other side refused this worker; the text is its reason."""


class TransferError(PdserveError):
    """The KV of one attempt is unusable; `reason` labels the metric, `detail` says what was found."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class RingUnavailable(PdserveError):
    """No memory can be shared between two workers; the text is the reason, for people."""


class OutOfBlocks(PdserveError):
    """Not enough free or evictable blocks at this moment."""


class StepCancelled(PdserveError):
    """Raised at a layer boundary when nothing in the running step is wanted any more."""
