"""Models whose layers hand each other more than one plain tensor, or are tied, frozen or without parameters."""

import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tests.train.toys import CLASSES, WIDTH, Masked, MixRows, Projection

Both = namedtuple("Both", "main aside")


class Fork(nn.Module):
    """Gives a dict: a tensor, a tuple with one that wants no gradient, integers, None, a number; one of them twice."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, 8)

    def forward(self, x):
        y = self.map(x)
        return {"y": y, "rest": (y.detach() * 2, torch.arange(x.shape[0])), "again": y, "nothing": None, "half": 0.5}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, y, rest, again, nothing, half):
        constant, number = rest
        assert nothing is None and number.dtype == torch.int64
        return [y * self.scale + half * constant, again + number[:, None, None] / 100]


class Pair(nn.Module):
    """Of what it gets, the second is used for some micro-batches only: then it gets no gradient."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, both):
        first, second = both
        chosen = bool(first.detach().sum() > 0)
        return Both(self.map(first) + (second if chosen else 0), second.detach().bool())


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, CLASSES)

    def forward(self, both):
        return self.map(both.main * both.aside)


@dataclass
class Structures(Masked):
    def layers(self):
        return [Fork, Join, Pair, Part]


class Trim(nn.Module):
    """Leaves out the columns in which a micro-batch is small everywhere: another shape each time."""

    def forward(self, x):
        widest = 2 + int(x.detach().abs().sum() * 1000) % (x.shape[-1] - 2)
        return nn.functional.pad(x[..., :widest], (0, 1))


class Widen(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8) * 0.3)

    def forward(self, x):
        return x @ self.weight[: x.shape[-1]]


@dataclass
class Lengths(Masked):
    """What crosses the border has another length in each micro-batch; so has it in one process with the same ones."""

    def layers(self):
        first, *rest = super().layers()
        return [first, Trim, Widen, *rest]


@dataclass
class InPlace(Masked):
    """Layers that write to what they get."""

    def layers(self):
        first, norm, last = super().layers()
        return [first, lambda: nn.ReLU(inplace=True), norm, lambda: nn.Hardtanh(inplace=True), last]


@dataclass
class WithoutParameters(Masked):
    """A layer that is a stage alone has none; another hands on what it got."""

    def layers(self):
        first, norm, last = super().layers()
        return [first, nn.Tanh, nn.Identity, norm, last]


def frozen(factory):
    def build():
        return factory().requires_grad_(False)

    return build


@dataclass
class FrozenFirst(Masked):
    """The first layers train nothing: no gradient goes back to them."""

    def layers(self):
        first, norm, last = super().layers()
        return [frozen(first), frozen(norm), lambda: nn.Linear(8, 8), last]


@dataclass
class FrozenMiddle(Masked):
    """The layer in the middle trains nothing, and passes gradients on."""

    def layers(self):
        first, norm, last = super().layers()
        return [first, frozen(lambda: nn.Linear(8, 8)), norm, last]


@dataclass
class TiedTwice(Masked):
    """One matrix in three places, a bias in two, of which one is in the same layer as another copy."""

    def layers(self):
        first, *rest = super().layers()
        middle = [lambda: nn.Linear(8, WIDTH), Projection, lambda: nn.Linear(8, WIDTH), Projection]
        return [first, *middle, *rest]

    def ties(self):
        return [
            ("layers.0.weight", "layers.2.weight"),
            ("layers.2.weight", "layers.4.weight"),
            ("layers.1.bias", "layers.3.bias"),
        ]


@dataclass
class SharedObject(Masked):
    """The very same module twice, which ties() does not say."""

    def layers(self):
        first, *rest = super().layers()
        made = []

        def same():
            if not made:
                made.append(nn.Linear(8, 8))
            return made[0]

        return [first, same, nn.Tanh, same, *rest]


@dataclass
class Mixed(Masked):
    """BatchNorm on the first stage and on the last one."""

    def layers(self):
        first, norm, last = super().layers()
        return [MixRows, first, norm, lambda: nn.Linear(8, WIDTH), MixRows, lambda: nn.Linear(WIDTH, 8), last]


@dataclass
class TiedFrozen(TiedTwice):
    """The matrix in three places is frozen, the bias in two is not."""

    def layers(self):
        first, narrow, project, narrow_again, project_again, *rest = super().layers()

        def without_weight(factory, *names):
            def build():
                layer = factory()
                for name in names:
                    getattr(layer, name).requires_grad_(False)
                return layer

            return build

        frozen_ones = [without_weight(each, "weight") for each in (first, project, project_again)]
        return [frozen_ones[0], narrow, frozen_ones[1], narrow_again, frozen_ones[2], *rest]


@dataclass
class HalfFrozen(TiedTwice):
    def layers(self):
        first, *rest = super().layers()
        return [frozen(first), *rest]


class Counting(nn.Module):
    """Puts another tensor in the place of its buffer in each forward, and uses it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1
        return x * (1 + self.seen / 100)


@dataclass
class Counted(Masked):
    def layers(self):
        return [Counting, *super().layers(), Counting]


class Giving(nn.Module):
    """Gives its buffer, which the next micro-batch changes, and a conjugate."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, 8)
        self.register_buffer("seen", torch.zeros(100_000, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen += 1
        y = self.map(x)
        return y, self.seen, torch.fft.fft(y).conj()


class Taking(nn.Module):
    def forward(self, given):
        y, seen, conjugate = given
        return y * (1 + seen[0] / 100) + conjugate.real / 10


@dataclass
class Buffered(Masked):
    def layers(self):
        _, *rest = super().layers()
        return [Giving, Taking, *rest]


class Noise(nn.Module):
    """Random numbers of NumPy and of Python."""

    def forward(self, x):
        return x * (1 + 0.1 * np.random.rand() + 0.1 * random.random())


@dataclass
class Noisy(Masked):
    def layers(self):
        return [Noise, *super().layers(), Noise]
