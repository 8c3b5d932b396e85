"""Bugs of parameter servers, one function each: it plants its bug by monkeypatch. Each must turn the replay red."""

from dataclasses import replace

import torch

from hpctrain.model.tables import EmbeddingTable
from hpctrain.plan.staleness import StalenessClock
from hpctrain.train import round as round_module
from hpctrain.train.answers import Answers
from hpctrain.train.served_update import ServedUpdate
from hpctrain.train.shard import Shard


def one_iteration_more_is_admitted(monkeypatch):
    admits = StalenessClock.admits

    def admit(self, worker, clock, bound=None):
        return admits(self, worker, clock, (self.bound if bound is None else bound) + 1)

    monkeypatch.setattr(StalenessClock, "admits", admit)


def a_round_goes_by_arrival_and_the_last_push_is_dropped(monkeypatch):
    apply_round = Shard._apply_round

    def drop(self, pushed):
        *taken, last = pushed.values()
        apply_round(self, dict(enumerate([*taken, replace(last, items=0.0, dense=None, rows={})])))

    monkeypatch.setattr(Shard, "_apply_round", drop)


def the_mean_of_means_is_taken(monkeypatch):
    apply_round = Shard._apply_round

    def alike(self, pushed):
        apply_round(self, {worker: _mean(each) for worker, each in pushed.items()})

    monkeypatch.setattr(Shard, "_apply_round", alike)


def _mean(iteration):
    if not iteration.items:
        return iteration
    rows = {table: (ids, sums / iteration.items) for table, (ids, sums) in iteration.rows.items()}
    dense = None if iteration.dense is None else iteration.dense / iteration.items
    return replace(iteration, items=1.0, dense=dense, rows=rows)


def a_row_that_several_push_is_stepped_for_each(monkeypatch):
    push = EmbeddingTable.push

    def one_by_one(self, ids, gradients, **how):
        for place in range(len(ids)):
            push(self, ids[place : place + 1], gradients[place : place + 1], **how)

    def put_together(pushes):
        return torch.cat([ids for ids, _ in pushes]), torch.cat([sums for _, sums in pushes])

    monkeypatch.setattr(EmbeddingTable, "push", one_by_one)
    monkeypatch.setattr(round_module, "add_up", put_together)


def a_pull_may_miss_what_its_worker_pushed(monkeypatch):
    def admit(self, worker, clock, bound=None):
        others = [each for number, each in enumerate(self.clocks) if number != worker and self.running[number]]
        return min(others, default=clock) >= clock - (self.bound if bound is None else bound)

    monkeypatch.setattr(StalenessClock, "admits", admit)


def an_answer_holds_the_weights_before_the_last_update(monkeypatch):
    step, before = Shard._step, {}

    def remember(self, update, lr):
        before[self] = self.dense.values.clone()
        step(self, update, lr)

    monkeypatch.setattr(Shard, "_step", remember)
    values = Answers._dense_values
    monkeypatch.setattr(Answers, "_dense_values", lambda self: before.get(self._shard, values(self)))


def weights_are_pulled_in_every_round(monkeypatch):
    init = ServedUpdate.__init__

    def every(self, *args, **settings):
        init(self, *args, **settings)
        self._every = 1

    monkeypatch.setattr(ServedUpdate, "__init__", every)


def rows_of_a_delay_are_asked_for_when_they_are_due(monkeypatch):
    def look_up(self, step):
        self.lookups.load(step)
        if step + 1 < self._until:
            self.lookups.ask(step + 1, self._clock_of(step + 1))

    monkeypatch.setattr(ServedUpdate, "_look_up", look_up)


BUGS = {  # and what shows it
    a_round_goes_by_arrival_and_the_last_push_is_dropped: {},
    the_mean_of_means_is_taken: {},
    a_row_that_several_push_is_stepped_for_each: {"task": "recommender", "optimizer": "adagrad"},
    a_pull_may_miss_what_its_worker_pushed: {"task": "recommender", "staleness": 1},
    an_answer_holds_the_weights_before_the_last_update: {"staleness": 1},
    weights_are_pulled_in_every_round: {"delay": 1},
    rows_of_a_delay_are_asked_for_when_they_are_due: {"task": "recommender", "delay": 2},
}
