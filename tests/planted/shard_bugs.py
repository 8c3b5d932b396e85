"""Bugs of a shared optimizer, one function each: it plants its bug by monkeypatch. Each must change what is trained."""

from hpctrain.model.optimizer_shard import OptimizerShard
from hpctrain.train.agreement import Agreement
from hpctrain.train.sharded_reduction import ShardedReduction


def weights_of_the_others_do_not_come(monkeypatch):
    monkeypatch.setattr(ShardedReduction, "gather_weights", lambda self: None)


def the_last_bucket_is_not_gathered(monkeypatch):
    init = ShardedReduction.__init__

    def forget(self, *args):
        init(self, *args)
        self.gathers.pop()

    monkeypatch.setattr(ShardedReduction, "__init__", forget)


def sums_are_not_divided(monkeypatch):
    monkeypatch.setattr(OptimizerShard, "scale", lambda self, factor: None)


def unused_parameters_are_stepped(monkeypatch):
    attach = OptimizerShard.attach
    monkeypatch.setattr(OptimizerShard, "attach", lambda self, names: attach(self, self.parameters))


def only_the_first_shard_counts_in_the_norm(monkeypatch):
    add = Agreement.add_squared_norm
    monkeypatch.setattr(Agreement, "add_squared_norm", lambda self, value: add(self, 0.0 if self._rank else value))


def the_neighbour_s_chunk_is_stepped(monkeypatch):
    init = OptimizerShard.__init__

    def shifted(self, gradients, weights, rank, size):
        init(self, gradients, weights, (rank + 1) % size, size)

    monkeypatch.setattr(OptimizerShard, "__init__", shifted)


BUGS = [value for name, value in sorted(vars().items()) if callable(value) and value.__module__ == __name__]
