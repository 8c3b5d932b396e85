"""Workers that are slow now and then: with real messages, and simulated."""

import heapq
import time
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.comm.roles import Roles
from hpctrain.plan.sharding import Segment
from hpctrain.plan.staleness import StalenessClock
from hpctrain.train.client import ServiceClient
from hpctrain.train.server import ParameterServer
from hpctrain.train.service import ServiceSettings, describe

NUM_ROWS, WIDTH, BATCH = 512, 32, 16  # of the data, and of a worker's gradient
RATE = 0.02


class Delays(NamedTuple):
    """Seconds that gradients take: slow ones, with `probability`, `factor` times as many. Worker `always` always is."""

    workers: int
    seconds: float
    factor: float
    probability: float
    seed: int
    always: int | None = None

    def of(self, worker: int, num_rounds: int) -> list[float]:
        """Of this worker's rounds; the same wherever they are asked for."""
        slow = np.random.default_rng([self.seed, worker]).random(num_rounds) < self.probability
        if worker == self.always:
            slow[:] = True
        return np.where(slow, self.factor * self.seconds, self.seconds).tolist()


class Course(NamedTuple):
    """How a training went: of each worker the share of its time that it waited; seconds and losses of worker 0."""

    shares: list[float]
    seconds: float
    losses: list[tuple[float, float]]


def simulated_waiting(delays: Delays, bound: float, num_rounds: int) -> list[float]:
    """Of each worker, the share of its time that it waits, where messages take no time."""
    clock: StalenessClock[int] = StalenessClock(delays.workers, bound)
    takes = [delays.of(worker, num_rounds) for worker in range(delays.workers)]
    events = [(seconds[0], worker) for worker, seconds in enumerate(takes)]  # when its gradient is ready
    heapq.heapify(events)
    ends = [0.0] * delays.workers
    while events:
        now, worker = heapq.heappop(events)
        ends[worker] = now
        mine = clock.tick(worker)
        if mine == num_rounds:
            clock.retire(worker)
        else:
            clock.park(worker, mine, worker)
        for other in clock.release():
            heapq.heappush(events, (now + takes[other][clock.clocks[other]], other))
    return [1 - sum(seconds) / end for seconds, end in zip(takes, ends)]


class LeastSquares:
    """Fixed data that a linear model can fit, in directions of different lengths."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        scales = torch.logspace(0, -1, WIDTH)
        self.inputs = torch.randn(NUM_ROWS, WIDTH, generator=generator) * scales
        self.targets = self.inputs @ torch.randn(WIDTH, generator=generator)

    def loss(self, weights: torch.Tensor) -> float:
        """The mean over all data."""
        return float((self.inputs @ weights - self.targets).square().mean())

    def gradient(self, weights: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Sums over these rows: the gradient, and the loss."""
        inputs = self.inputs[chosen]
        errors = inputs @ weights - self.targets[chosen]
        return 2 * inputs.T @ errors, float(errors.square().sum())


def train(comm, delays: Delays, bound: float, num_rounds: int) -> Course:
    """The same on all ranks. Collective."""
    torch.set_num_threads(1)
    with Roles(comm, 1) as roles:
        if roles.is_server:
            ParameterServer(roles).serve()
            told = None
        else:
            settings = ServiceSettings(staleness=bound, optimizer="sgd")
            described = describe(settings, torch.float32, [Segment("weights", 0, WIDTH)], WIDTH, [], 1)
            client = ServiceClient(roles, described, torch.zeros(WIDTH))
            told = _work(client, roles, delays, num_rounds)
            client.done()
        told = [each for each in roles.everybody.all_gather_json(told) if each is not None]
    losses = [tuple(each) for each in told[0]["losses"]]
    return Course([each["waited"] for each in told], told[0]["seconds"], losses)


def _work(client: ServiceClient, roles: Roles, delays: Delays, num_rounds: int) -> dict:
    """A worker's rounds."""
    data, weights, waited, losses = LeastSquares(), torch.zeros(WIDTH), 0.0, []
    generator = torch.Generator().manual_seed(1 + roles.rank)
    rate = RATE if client.description.settings.gathers else RATE / roles.num_workers
    client.pull(0, weights).wait()  # when all are there
    began = time.perf_counter()
    for clock, seconds in enumerate(delays.of(roles.rank, num_rounds)):
        asked = time.perf_counter()
        client.pull(clock, weights).wait()
        ready = time.perf_counter()
        waited += ready - asked
        if roles.rank == 0:
            losses.append((ready - began, data.loss(weights)))
        chosen = torch.randint(NUM_ROWS, (BATCH,), generator=generator)
        gradient, loss = data.gradient(weights, chosen)
        time.sleep(max(0.0, seconds - (time.perf_counter() - ready)))
        client.push(clock, BATCH, loss, rate, gradient, [True])
    client.wait_sent()
    return {"waited": waited / (time.perf_counter() - began), "seconds": time.perf_counter() - began, "losses": losses}
