"""An update whose optimizer is shared out among the replicas: each holds the state of its shard only, and steps that.

ZeRO stage 1 (Rajbhandari et al., SC 2020). Gradients are reduce-scattered instead of all-reduced, and after the step
the weights are all-gathered: the same bytes as an all-reduce, and the same sums, since the ring adds up a chunk in the
same order either way. Weights are whole again on every rank when a step ends.
"""

from hpctrain.comm.allreduce import wire_of
from hpctrain.model.optimizer_shard import OptimizerShard
from hpctrain.train.sharded_reduction import ShardedReduction
from hpctrain.train.update import Update


class ShardedUpdate(Update):
    """As Update, on two replicas or more; `optimizer` is over the parameters of `shard`, None where it has none.

    The norm for clipping is summed over all ranks in double precision, so it may differ in its last bits from that
    which one rank computes of the whole gradient.
    """

    def __init__(self, *args, shard: OptimizerShard, **settings):
        self.shard = shard
        super().__init__(*args, **settings)
        self.stepped, self._looks = shard, True  # nobody else holds these sums

    def _build_reduction(self, algorithm: str, compress: str) -> ShardedReduction:
        ring = self.mesh.data.ring
        compress = wire_of(ring, algorithm, compress)
        reduction = ShardedReduction(self.gradients, self.shard, ring, self.tied.names, compress)
        self.gathers = reduction.gathers
        return reduction

    @property
    def _needs_norm(self) -> bool:
        return self.clip_norm is not None

    def change(self, step: int) -> None:
        super().change(step)
        self.reduction.gather_weights()
