"""Bugs of training, one function each: it plants its bug by monkeypatch. Each must turn the first law red."""

import numpy as np

from hpctrain.model.gradients import FlatGradients
from hpctrain.train.agreement import Agreement
from hpctrain.train.batches import Batches
from hpctrain.train.passes import Passes
from hpctrain.train.update import Update


def gradients_of_the_step_before_stay(monkeypatch):
    zero = FlatGradients.zero

    def keep(self):
        kept = self._arena.clone()
        zero(self)
        self._arena.copy_(kept)

    monkeypatch.setattr(FlatGradients, "zero", keep)


def every_rank_divides_by_its_own_count(monkeypatch):
    exchange = Agreement.exchange

    def own_count(self):
        items = self._items.copy()
        exchange(self)
        self._items[:] = items

    monkeypatch.setattr(Agreement, "exchange", own_count)


def all_replicas_read_the_first_piece(monkeypatch):
    init = Batches.__init__
    monkeypatch.setattr(
        Batches, "__init__", lambda self, reader, sampler, replica, *rest: init(self, reader, sampler, 0, *rest)
    )


def unused_parameters_are_stepped(monkeypatch):
    monkeypatch.setattr(Agreement, "touched", lambda self: set(self._names))


def one_bucket_stays_at_home(monkeypatch):
    def keep_bucket_0(self, number):
        if number:
            self.reduction.start(number)
        else:
            self.reduction.collectives[0].wait = lambda: None

    monkeypatch.setattr(Update, "_start_reduction", keep_bucket_0)


def the_last_micro_batch_is_forgotten(monkeypatch):
    backward = Passes._backward

    def forget(self, action):
        if action.microbatch == self.batches.num_microbatches - 1 and self._flight(action) is not None:
            self._end(self._flight(action), action)
        else:
            backward(self, action)

    monkeypatch.setattr(Passes, "_backward", forget)


def every_replica_has_an_order_of_its_own(monkeypatch):
    init = Batches.__init__

    def own_order(self, reader, sampler, replica, *rest):
        init(self, reader, sampler, replica, *rest)
        rows = sampler.rows
        sampler.rows = lambda step: np.roll(rows(step), replica)

    monkeypatch.setattr(Batches, "__init__", own_order)


BUGS = [value for name, value in sorted(vars().items()) if callable(value) and value.__module__ == __name__]
