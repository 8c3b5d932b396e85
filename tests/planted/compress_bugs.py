"""Bugs of compressed sums, one function each: it plants its bug by monkeypatch. The law of the bits must see each."""

import numpy as np

from hpctrain.comm.bfloat16 import BFloat16, TorchBFloat16
from hpctrain.comm.compressed import CompressedCollective, CompressedDoubling


def numbers_are_cut_off(monkeypatch):
    def truncate(self, values, bits):
        bits[:] = values.astype(np.float32).view(np.uint32) >> 16

    for each in (BFloat16, TorchBFloat16):
        monkeypatch.setattr(each, "round", truncate)


def nan_is_rounded_as_a_number(monkeypatch):
    def naive(self, values, bits):
        words = values.astype(np.float32).view(np.uint32)
        bits[:] = (words + 0x7FFF + ((words >> 16) & 1)) >> 16

    for each in (BFloat16, TorchBFloat16):
        monkeypatch.setattr(each, "round", naive)


def who_made_the_sum_keeps_it_as_it_was(monkeypatch):
    monkeypatch.setattr(BFloat16, "keep", lambda self, values, bits: self.round(values, bits))


def sums_are_made_in_bfloat16(monkeypatch):
    add = BFloat16.add

    def rounded_first(self, bits, values):
        self.keep(values, np.empty(len(values), np.uint16))
        add(self, bits, values)

    monkeypatch.setattr(BFloat16, "add", rounded_first)


def what_is_passed_on_is_rounded_again_from_old_numbers(monkeypatch):
    def outgoing(self, index):
        start, stop = self._sends[index]
        self._ring.bfloat16.round(self.native.values[start:stop], self._bits.values[start:stop])
        return self._bits.message(start, stop)

    monkeypatch.setattr(CompressedCollective, "_outgoing", outgoing)
    monkeypatch.setattr(CompressedCollective, "_take_in", _widen_too_late)


def _widen_too_late(self, index):
    if index < self._num_reducing:
        TAKE_IN(self, index)
    elif index == len(self._receives) - 1:
        for later in range(self._num_reducing, len(self._receives)):
            TAKE_IN(self, later)


TAKE_IN = CompressedCollective._take_in


def partners_add_their_own_numbers_as_they_were(monkeypatch):
    def outgoing(self, kind):
        self._ring.bfloat16.round(self.native.values, self._leaving.values)
        return self._leaving.message(0, len(self.native))

    monkeypatch.setattr(CompressedDoubling, "_outgoing", outgoing)


def those_beyond_get_another_sum(monkeypatch):
    def complete(self):
        self.native.finish(0, len(self.native), self.native, self.divisor)

    monkeypatch.setattr(CompressedDoubling, "_complete", complete)


RING = {  # and how many ranks show it
    numbers_are_cut_off: 2,
    nan_is_rounded_as_a_number: 2,
    who_made_the_sum_keeps_it_as_it_was: 2,
    sums_are_made_in_bfloat16: 2,
    what_is_passed_on_is_rounded_again_from_old_numbers: 3,
}
DOUBLING = {partners_add_their_own_numbers_as_they_were: 2, those_beyond_get_another_sum: 3}
