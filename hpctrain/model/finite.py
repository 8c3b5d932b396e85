"""Whether gradients are finite, bucket by bucket: a rank's own before they become part of a sum, or the sums.

On the host a bucket is looked at at once. A device is told to look, and asked for all that it saw when it has all its
work: to wait for it at each bucket would leave it without work meanwhile.
"""

from collections.abc import Iterator

import torch

from hpctrain.model.buckets import Bucket, Buckets


class Finite:
    """Of `gradients`, in one step."""

    def __init__(self, gradients: Buckets):
        self._gradients = gradients
        self._found: list[str] = []
        self._asked: list[tuple[Bucket, torch.Tensor]] = []

    def look_at(self, bucket: Bucket) -> None:
        """As it is now."""
        if bucket.flat.device.type != "cpu":
            self._asked.append((bucket, torch.isfinite(bucket.flat).all()))
        elif (name := self._gradients.not_finite(bucket)) is not None:
            self._found.append(name)

    def not_finite(self) -> Iterator[str]:
        """Names of parameters, one of each bucket that was not.

        Of a device's bucket that is a sum by now: the first in which that is not finite.
        """
        yield from self._found
        seen = torch.stack([flag for _, flag in self._asked]).cpu().tolist() if self._asked else []
        for (bucket, _), is_finite in zip(self._asked, seen):
            if not is_finite:
                yield self._gradients.not_finite(bucket) or bucket.names[0]
