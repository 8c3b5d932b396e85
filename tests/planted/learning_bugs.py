"""Bugs of clipping, schedule and evaluation, one function each: it plants its bug by monkeypatch."""

import torch

from hpctrain.model.gradients import FlatGradients
from hpctrain.plan.learning_rate import learning_rate
from hpctrain.train import trainer
from hpctrain.train.batches import GlobalSampler
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.statistics import RunningStatistics


def clipping_is_forgotten(monkeypatch):
    monkeypatch.setattr(FlatGradients, "clip", lambda self, longest: 0.0)


def each_bucket_is_clipped_by_its_own_norm(monkeypatch):
    def clip(self, longest):
        for bucket in self.buckets:
            torch.nn.utils.clip_grad_norm_([self.parameters[name] for name in bucket.names], longest)
        return 0.0

    monkeypatch.setattr(FlatGradients, "clip", clip)


def the_schedule_is_a_step_early(monkeypatch):
    monkeypatch.setattr(trainer, "learning_rate", lambda step, **how: learning_rate(step + 1, **how))


def every_replica_evaluates_all_rows_of_the_first(monkeypatch):
    run = Evaluation.run

    def first_rows(self, stage, links):
        self.rows = self._mesh.world.broadcast_json(self.rows)
        return run(self, stage, links)

    monkeypatch.setattr(Evaluation, "run", first_rows)


def every_epoch_has_the_order_of_the_first(monkeypatch):
    rows = GlobalSampler.rows
    monkeypatch.setattr(GlobalSampler, "rows", lambda self, step: rows(self, step % self.steps_per_epoch))


def statistics_stay_those_of_one_rank(monkeypatch):
    monkeypatch.setattr(RunningStatistics, "average", lambda self, weight: None)


TRAINING = (clipping_is_forgotten, each_bucket_is_clipped_by_its_own_norm, the_schedule_is_a_step_early)
TRAINING += (every_epoch_has_the_order_of_the_first,)
EVALUATION = (every_replica_evaluates_all_rows_of_the_first, statistics_stay_those_of_one_rank)
