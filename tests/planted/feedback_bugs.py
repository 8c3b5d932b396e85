"""Bugs of compressors and of what they keep, one function each: it plants its bug by monkeypatch."""

from hpctrain.model import power_sgd, top_k
from hpctrain.model.power_sgd import PowerBucket
from hpctrain.model.top_k import TopKBucket
from hpctrain.train.feedback import BucketExchange

SETTLE, GO_ON = BucketExchange.settle, BucketExchange._go_on


def what_was_not_sent_is_lost(monkeypatch):
    def settle(self, applied, used):
        SETTLE(self, applied, used)
        self.kept.zero_()

    monkeypatch.setattr(BucketExchange, "settle", settle)


def what_was_sent_is_kept_too(monkeypatch):
    def settle(self, applied, used):
        self._left.copy_(self.flat_before)
        SETTLE(self, applied, used)

    def start(self):
        self.flat_before = self._flat + self.kept
        START(self)

    monkeypatch.setattr(BucketExchange, "start", start)
    monkeypatch.setattr(BucketExchange, "settle", settle)


START = BucketExchange.start


def what_is_kept_is_divided_by_the_ranks(monkeypatch):
    def settle(self, applied, used):
        SETTLE(self, applied, used)
        self.kept /= self._ring.size

    monkeypatch.setattr(BucketExchange, "settle", settle)


def a_skipped_step_is_kept(monkeypatch):
    monkeypatch.setattr(BucketExchange, "settle", lambda self, applied, used: SETTLE(self, True, used))


def what_nobody_used_is_sent_and_lost(monkeypatch):
    monkeypatch.setattr(BucketExchange, "settle", lambda self, applied, used: SETTLE(self, applied, self._places))


def the_sum_is_not_divided(monkeypatch):
    def go_on(self):
        self.divisor = 1
        GO_ON(self)

    monkeypatch.setattr(BucketExchange, "_go_on", go_on)


def the_smallest_are_sent(monkeypatch):
    monkeypatch.setattr(top_k, "largest", lambda values, count: values.abs().argsort()[:count])


def each_rank_adds_its_own_first(monkeypatch):
    def exchange(self, flat, left):
        yield from EXCHANGE(self, flat, left)
        flat.zero_()
        for step in range(len(self._rows)):
            values, places = self._rows[(self._rank + step) % len(self._rows)]
            flat.index_add_(0, places, values)

    monkeypatch.setattr(TopKBucket, "exchange", exchange)


EXCHANGE = TopKBucket.exchange


def the_factor_is_not_orthogonal(monkeypatch):
    orthogonal = power_sgd.orthogonal
    monkeypatch.setattr(power_sgd, "orthogonal", lambda matrix: 2 * orthogonal(matrix))


def each_step_begins_anew(monkeypatch):
    monkeypatch.setattr(PowerBucket, "settle", lambda self, applied: None)


TOP_K = [
    what_was_not_sent_is_lost,
    what_was_sent_is_kept_too,
    what_is_kept_is_divided_by_the_ranks,
    the_sum_is_not_divided,
    the_smallest_are_sent,
    each_rank_adds_its_own_first,  # three ranks show it
]
POWER_SGD = [
    what_was_not_sent_is_lost,
    what_is_kept_is_divided_by_the_ranks,
    the_sum_is_not_divided,
    the_factor_is_not_orthogonal,
    each_step_begins_anew,
]
