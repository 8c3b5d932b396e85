"""Whether a rank's own gradients are finite, looked at before they become part of a sum.

On the host each bucket is looked at as it is complete. A device is told to look, and asked for what it saw when it has
all its work: to wait for it at each bucket would leave it without work meanwhile.
"""

from collections.abc import Iterator

import torch

from hpctrain.model.buckets import Bucket, Buckets


class OwnGradients:
    """Of `gradients`, in one step."""

    def __init__(self, gradients: Buckets):
        self._gradients = gradients
        self._found: list[str] = []
        self._asked: list[tuple[Bucket, torch.Tensor]] = []

    def look_at(self, bucket: Bucket) -> None:
        """It is complete, and still this rank's own."""
        if bucket.flat.device.type != "cpu":
            self._asked.append((bucket, torch.isfinite(bucket.flat.sum())))
        elif (name := self._gradients.not_finite(bucket)) is not None:
            self._found.append(name)

    def not_finite(self) -> Iterator[str]:
        """Names of parameters, one of each bucket that was not.

        Of a device's bucket that is a sum by now: the first in which that is not finite.
        """
        yield from self._found
        for bucket, is_finite in self._asked:
            if not is_finite:
                yield self._gradients.not_finite(bucket) or bucket.names[0]
