"""One replica's share of a stage's weights and gradients, which its optimizer steps (ZeRO stage 1).

Of each bucket the replica owns the chunk that a reduce-scatter along the ring leaves summed with it (Rajbhandari et
al., ZeRO, SC 2020). What of a parameter lies in that chunk is a parameter of its own, in one dimension, on the same
memory: a step of an optimizer that treats each element alone changes it as a step of the whole would.
"""

from collections.abc import Iterable

import torch
from torch import nn

from hpctrain.model.buckets import Bucket, Buckets
from hpctrain.model.gradients import FlatGradients
from hpctrain.plan.grid import piece_of
from hpctrain.plan.sharding import Segment, within


class OptimizerShard(Buckets):
    """Chunk `rank` of split_evenly(length, size) of each bucket of `gradients`, which may hold part of no parameter.

    `weights` is the memory that all parameters lie in, laid out as `gradients.flat`. `parameters` are the owned parts
    by name, in the order of the buckets; `views` their gradients, in the memory of the whole ones.
    `starts`: at which of the whole parameter's numbers the owned part begins.
    """

    def __init__(self, gradients: FlatGradients, weights: torch.Tensor, rank: int, size: int):
        self.buckets, self.views = [], {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.starts: dict[str, int] = {}
        self.weights = list(weights.split([len(bucket.flat) for bucket in gradients.buckets]))  # whole, by bucket
        places, first = gradients.places, 0
        for bucket, memory in zip(gradients.buckets, self.weights):
            chunk = piece_of(len(bucket.flat), size, rank)
            segments = [Segment(name, places[name].start - first, places[name].stop - first) for name in bucket.names]
            owned = within(segments, chunk.start, chunk.stop)
            self.buckets.append(Bucket([name for name, _, _ in owned], bucket.flat[chunk.start : chunk.stop]))
            for name, start, stop in owned:
                self.views[name] = bucket.flat[start:stop]
                self.parameters[name] = nn.Parameter(memory[start:stop])
                self.starts[name] = first + start - places[name].start
            first += len(bucket.flat)

    def attach(self, names: Iterable[str]) -> None:
        """Gives the parameters named their gradient, and all others None: an optimizer leaves those alone."""
        chosen = set(names)
        for name, parameter in self.parameters.items():
            parameter.grad = self.views[name] if name in chosen else None
