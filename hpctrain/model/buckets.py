"""Gradients in buckets, or a rank's share of them: what is computed from all of them together."""

from collections.abc import Iterable

import torch


class Bucket:
    """Consecutive gradients of one dtype in one memory, `flat`, padding included, which is zero."""

    def __init__(self, names: list[str], flat: torch.Tensor):
        self.names = names
        self.flat = flat


class Buckets:
    """`views`: by name where each gradient, or the part of it that is here, lies in one of the `buckets`."""

    buckets: list[Bucket]
    views: dict[str, torch.Tensor]

    def scale(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def squared_norm(self, names: Iterable[str]) -> float:
        """The sum of the squares of these gradients, in double precision."""
        norms = [torch.linalg.vector_norm(self.views[name], dtype=torch.float64) for name in names]
        return sum(norm**2 for norm in torch.stack(norms).cpu().tolist()) if norms else 0.0

    def shorten(self, longest: float, norm: float) -> float:
        """Shortens them to norm `longest`, where `norm` is that of all gradients of the model and is longer.

        Returns what they were multiplied by.
        """
        factor = min(1.0, longest / (norm + 1e-6))
        self.scale(factor)
        return factor

    def not_finite(self, bucket: Bucket) -> str | None:
        """Name of the first parameter of the bucket whose gradient holds NaN or infinity, or None."""
        if torch.isfinite(bucket.flat.sum()):
            return None  # a sum is one pass over memory, and nothing that is not finite gets lost in it
        return next((name for name in bucket.names if not torch.isfinite(self.views[name]).all()), None)
