"""Bugs of pipelines, one function each: it plants its bug by monkeypatch. Each must turn its check red."""

from itertools import count

from hpctrain.model import stage as stage_module
from hpctrain.model.stash import WeightStash
from hpctrain.train import local_update
from hpctrain.train.links import Links
from hpctrain.train.passes import Passes
from hpctrain.train.tied import TiedWeights
from hpctrain.train.update import Update


def received_memory_is_given_back_too_early(monkeypatch):
    take = Links.take

    def lend(self, op, chunk):
        tensors, note = take(self, op, chunk)
        self.release(op, chunk, tensors)
        return tensors, note

    monkeypatch.setattr(Links, "take", lend)


def rows_of_a_gradient_come_back_in_another_order(monkeypatch):
    receive = Passes._receive_gradients

    def turn(self, action):
        receive(self, action)
        flight = self._flight(action)
        if flight is not None:
            flight.gradients = {place: each.flip(0) for place, each in flight.gradients.items()}

    monkeypatch.setattr(Passes, "_receive_gradients", turn)


def copies_of_a_parameter_are_not_added_up(monkeypatch):
    monkeypatch.setattr(TiedWeights, "add_up", lambda self, gradients: None)


def copies_count_twice_in_the_norm(monkeypatch):
    monkeypatch.setattr(TiedWeights, "own", lambda self, names: list(names))


def each_stage_clips_alone(monkeypatch):
    monkeypatch.setattr(Update, "_needs_norm", False)


def the_last_weight_gradient_is_forgotten(monkeypatch):
    weights = Passes._weights

    def forget(self, action):
        if action.microbatch == self.batches.num_microbatches - 1:
            flight = self._flight(action)
            if flight is not None:
                self._end(flight, action)
        else:
            weights(self, action)

    monkeypatch.setattr(Passes, "_weights", forget)


def the_second_forward_draws_other_numbers(monkeypatch):
    derive, calls = stage_module.derive_seed, count()
    monkeypatch.setattr(stage_module, "derive_seed", lambda *parts: derive(*parts, next(calls)))


def the_newest_weights_are_used_by_all(monkeypatch):
    monkeypatch.setattr(WeightStash, "weights", lambda self, version: self._versions[max(self._versions)])


def weights_are_one_version_older(monkeypatch):
    used = local_update.version_used
    monkeypatch.setattr(local_update, "version_used", lambda *args: max(0, used(*args) - 1))


def a_version_is_not_filled(monkeypatch):
    publish = WeightStash.publish

    def keep(self, version):
        before = [parameter.detach().clone() for parameter in self._parameters.values()]
        if version % 3 == 2:
            for parameter in self._parameters.values():
                parameter.data.add_(1e-6)
        publish(self, version)
        for parameter, values in zip(self._parameters.values(), before):
            parameter.data.copy_(values)

    monkeypatch.setattr(WeightStash, "publish", keep)


SYNCHRONOUS = {  # and what shows it
    received_memory_is_given_back_too_early: {"schedule": "f-then-b"},
    rows_of_a_gradient_come_back_in_another_order: {},
    copies_of_a_parameter_are_not_added_up: {},
    copies_count_twice_in_the_norm: {"clip_norm": 0.05},
    each_stage_clips_alone: {"clip_norm": 0.05},
    the_last_weight_gradient_is_forgotten: {"schedule": "zb-h1"},
    the_second_forward_draws_other_numbers: {"recompute": True},
}
ASYNCHRONOUS = {
    the_newest_weights_are_used_by_all: "2bw",
    weights_are_one_version_older: "1f1b-async",
    a_version_is_not_filled: "1f1b-async",
}
