"""Bugs of a training loop of one's own, one function each: it plants its bug by monkeypatch."""

import hpctrain.train.api
from hpctrain.model.gradients import FlatGradients
from hpctrain.train.reduction import Reduction
from hpctrain.train.synchronise import GlobalGradients


class Nothing:
    """An exchange that does not happen."""

    began = seconds = 0.0

    def start(self):
        pass

    def wait(self):
        pass


def who_used_a_parameter_is_not_agreed_on(monkeypatch):
    init = GlobalGradients.__init__

    def alone(self, *args):
        init(self, *args)
        self._agreement = Nothing()

    monkeypatch.setattr(GlobalGradients, "__init__", alone)


def what_a_parameter_got_once_stays_in_the_arena(monkeypatch):
    def flush(self):
        while self._num_ready < len(self.buckets):
            self._report()

    monkeypatch.setattr(FlatGradients, "flush", flush)


def a_gradient_that_was_cut_off_is_not_taken_over(monkeypatch):
    monkeypatch.setattr(FlatGradients, "adopt", FlatGradients._hand_out)


def the_mean_is_a_sum(monkeypatch):
    begin = GlobalGradients.begin
    monkeypatch.setattr(GlobalGradients, "begin", lambda self, num_active: begin(self, 1))


def the_first_bucket_stays_at_home(monkeypatch):
    start = Reduction.start

    def skip(self, number):
        if number:
            start(self, number)
        else:
            self.collectives[0] = Nothing()
            self.collectives[0].seconds = 0.0

    monkeypatch.setattr(Reduction, "start", skip)


def a_rank_that_is_done_makes_no_updates(monkeypatch):
    monkeypatch.setattr(hpctrain.train.api, "as_call", lambda step: lambda: None)


LOOP = (who_used_a_parameter_is_not_agreed_on, what_a_parameter_got_once_stays_in_the_arena)
LOOP += (the_mean_is_a_sum, the_first_bucket_stays_at_home)
LOOP += (a_gradient_that_was_cut_off_is_not_taken_over,)
JOIN = (a_rank_that_is_done_makes_no_updates,)
