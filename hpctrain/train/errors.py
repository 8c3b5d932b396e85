"""Errors that all ranks know of."""


class AgreedError(RuntimeError):
    """Raised on every rank alike, after they agreed: rank 0 prints one line, and the job ends in order."""


class NotFinite(AgreedError):
    """NaN or infinity in the loss or in a gradient of some rank."""
