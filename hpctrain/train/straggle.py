"""Slows a rank on purpose, to see what a slow rank does to the others."""

import random
import time

from hpctrain.config.servers import read_straggler
from hpctrain.plan.seeds import derive_seed


class Straggle:
    """Of --straggler `text`, on one rank: `after(step, seconds)` sleeps so that computing took `factor` times as long.

    In which steps is drawn from (seed, rank, step), so a run is slow in the same steps again.
    """

    def __init__(self, text: str, seed: int, rank: int):
        chosen, self._factor, self._probability = read_straggler(text)
        self._concerned, self._seed, self._rank = chosen in (None, rank), seed, rank

    def is_slow(self, step: int) -> bool:
        draw = random.Random(derive_seed(self._seed, "straggler", self._rank, step)).random()
        return self._concerned and draw < self._probability

    def after(self, step: int, seconds: float) -> None:
        """`seconds`: what this rank has just computed."""
        if self.is_slow(step):
            time.sleep((self._factor - 1) * seconds)
