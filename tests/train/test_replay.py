"""Training with servers equals what its logs say, computed again in one process: weights and tables to 1e-12."""

import random
import time
from functools import cache
from math import inf

import pytest
import torch
from torch.func import functional_call

from hpctrain.comm.buffer import allocate
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.precision import Precision
from hpctrain.model.row_values import first_values
from hpctrain.model.stage import build_stage
from hpctrain.plan.grid import piece_of
from hpctrain.plan.learning_rate import learning_rate
from hpctrain.plan.seeds import derive_seed
from hpctrain.plan.sharding import Segment, cut_dense
from hpctrain.train.batches import GlobalSampler
from tests.oracles.served_log import Run
from tests.oracles.served_replay import Replay
from tests.train.recommender import Recommender
from tests.train.serving import on_ranks, train
from tests.train.sharing import by_rank_0
from tests.train.toys import Deep, Masked, Unused

TASKS = {
    "deep": Deep(),
    "masked": Masked(),
    "unused": Unused(),
    "recommender": Recommender(),
    "padded": Recommender(padded=True),
}
RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 0.01, "adamw": 0.01, "adagrad": 0.05}  # what diverges has no 1e-12
STEPS, DRAIN, ROWS, BUCKET_BYTES, WEIGHT_DECAY = 14, 9, 13, 200, 0.01
KINDS = {"plain": {}, "delay-1": {"delay": 1}, "delay-2": {"delay": 2}, "window-1": {"delay_window": 1}}
LAYOUTS = [(1, 1), (2, 1), (3, 1), (2, 2), (5, 1), (3, 2), (5, 2)]
BOUNDS = (0, 1, 3, inf)
CHOICES = [
    ("deep", "sgd", {}),
    ("recommender", "adagrad", {}),
    ("masked", "adam", {"lr_schedule": "cosine"}),
    ("padded", "sgd", {"table_optimizer": "adam", "lr": 0.02}),
    ("unused", "momentum", {}),
    ("recommender", "adamw", {"lr_schedule": "linear"}),
]


class Slow:
    """A task whose loss takes up to 20 ms more, at random by worker and step."""

    def __init__(self, task, worker: int):
        self._task, self._random = task, random.Random(worker)

    def __getattr__(self, name):
        return getattr(self._task, name)

    def loss(self, outputs, targets):
        time.sleep(0.02 * self._random.random() ** 3)
        return self._task.loss(outputs, targets)


class Whole(torch.nn.Module):
    """All layers of a task as one module with embeddings of torch, under the names that training has."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Data:
    """Rows of each step and worker, by a plain reading of the rules."""

    def __init__(self, task, num_workers: int, stops: list[int], evaluates: bool):
        self.task, self.num_workers, self.stops, self.evaluates = task, num_workers, stops, evaluates
        self.tables = task.tables() if hasattr(task, "tables") else {}
        self.model = Whole(build_stage(task.layers(), 0, Precision("float64")).layers)
        self.train, self.held_out = task.dataset("train"), task.dataset("eval")
        self.sampler = GlobalSampler(len(self.train), ROWS, 0)
        self.ids = cache(self._ids)

    def batch(self, step: int, worker: int):
        rows = self.sampler.rows(step)
        piece = piece_of(len(rows), self.num_workers, worker)
        chosen = rows[piece.start : piece.stop]
        return [torch.stack(each) for each in zip(*(self.train[row] for row in chosen))]

    def compute(self, values, step: int, worker: int):
        batch = self.batch(step, worker)
        return self.task.loss(functional_call(self.model, values, (batch[0],)), batch[1]) if batch else None

    def _ids(self, step: int, worker: int):
        batch = self.batch(step, worker)
        return self.looked_up(batch[0]) if batch else dict.fromkeys(self.tables, torch.empty(0, dtype=torch.int64))

    def looked_up(self, inputs):
        return {name: table.ids(inputs).unique() for name, table in self.tables.items()}

    def looks(self, stop: int, worker: int):
        """Evaluations look up rows of each batch; at the end the whole tables are looked at."""
        found = []
        if self.evaluates and stop % DRAIN == 0:
            mine, size = piece_of(len(self.held_out), self.num_workers, worker), max(1, ROWS // self.num_workers)
            for start in range(mine.start, mine.stop, size):
                rows = self.held_out[start : min(mine.stop, start + size)]
                found.append(self.looked_up(torch.stack([inputs for inputs, _ in rows])))
        if stop == self.stops[-1]:
            sizes = {name: dict(self.model.named_parameters())[name].shape[0] for name in self.tables}
            found.append({name: torch.arange(size) for name, size in sizes.items()})
        return found


def described(task, num_workers, num_servers, *, optimizer, staleness=0, evaluates=True, **how) -> Run:
    """What the oracle has to know of a run of `trained`."""
    stops = sorted({*(range(DRAIN, STEPS, DRAIN) if evaluates else ()), STEPS})
    data = Data(task, num_workers, stops, evaluates)
    everything = dict(data.model.named_parameters())
    dense = {name: each for name, each in everything.items() if name not in data.tables}
    places = FlatGradients(dense, allocate, BUCKET_BYTES).places
    total = sum(-(-each.numel() // 8) * 8 for each in dense.values())
    cut = cut_dense([Segment(name, each.start, each.stop) for name, each in places.items()], total, num_servers)
    return Run(
        num_workers=num_workers,
        staleness=staleness,
        stops=stops,
        parts=[[(n, a - places[n].start, b - places[n].start) for n, a, b in part.segments] for part in cut],
        weights={name: each.detach() for name, each in dense.items()},
        compute=data.compute,
        optimizer=(optimizer, 0.9, WEIGHT_DECAY),
        tables={name: beginning(name, *everything[name].shape, table.std) for name, table in data.tables.items()},
        ids=data.ids,
        looks=data.looks,
        table_optimizer=(how.get("table_optimizer", optimizer), 0.9, WEIGHT_DECAY),
        delay=how.get("delay", 0),
        window=how.get("delay_window", 0),
    )


def beginning(name: str, num_rows: int, width: int, std: float) -> torch.Tensor:
    return torch.from_numpy(first_values(derive_seed(0, "table", name), torch.arange(num_rows).numpy(), width, std))


def trained(comm, task, num_workers, num_servers, *, optimizer, evaluates=True, **how):
    """Losses on rank 0, weights on workers, and the logs. Collective over ranks of `comm` that are just enough."""
    return train(
        comm,
        Slow(task, comm.rank),
        num_workers,
        num_servers,
        steps=STEPS,
        global_batch_size=ROWS,
        bucket_bytes=BUCKET_BYTES,
        optimizer=optimizer,
        weight_decay=WEIGHT_DECAY,
        eval_every=DRAIN if evaluates else None,
        **{"lr": RATES[optimizer], **how},
    )


def check(comm, task, num_workers, num_servers, **how):
    """Trains, and holds what came of it against the logs; returns the replay (on rank 0) and the logs. Collective."""
    losses, weights, logs = trained(comm, task, num_workers, num_servers, **how)
    kept = []

    def verdict():
        try:
            kept.append(Replay(described(task, num_workers, num_servers, **how), logs))
            assert losses == pytest.approx(kept[0].losses, rel=1e-12, abs=0)
            check_rates(logs, how.get("lr", RATES[how["optimizer"]]), **how)
            check_weights(weights, {**kept[0].weights, **kept[0].tables})
        except AssertionError as error:
            return str(error), None
        return None, {**kept[0].weights, **kept[0].tables}

    problem, expected = by_rank_0(comm, verdict)
    assert problem is None, problem
    if weights is not None:
        check_weights(weights, expected)
    return (kept[0] if kept else None), logs


def check_weights(weights, expected) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        error = (weights[name] - weight).abs().max()
        assert error <= 1e-12 * max(1.0, float(weight.abs().max())), f"{name}: {error}"


def check_rates(logs, peak: float, *, lr_schedule="constant", adapt_lr=False, **rest) -> None:
    """Updates have the learning rate of their round, however late they come; or a part of it, by their lag."""
    for event in (event for log in logs for event in log if event["do"] == "apply"):
        rate = learning_rate(event["clock"], STEPS, peak, lr_schedule)
        assert event["lr"] == (rate / max(1, event["lag"]) if adapt_lr else rate), event


def is_wide(workers, servers, staleness, kind) -> bool:
    """On up to 4 ranks each two of layout, bound and kind come together once in what is not."""
    turn = LAYOUTS.index((workers, servers)) + BOUNDS.index(staleness) + list(KINDS).index(kind)
    return workers + servers > 4 or turn % 4 != 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.wide_if(case=is_wide)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("staleness", BOUNDS)
@pytest.mark.parametrize("workers, servers", LAYOUTS)
def test_training_equals_what_its_logs_say(comm, workers, servers, staleness, kind):
    if workers + servers > comm.size:
        pytest.skip(f"needs {workers + servers} ranks")
    if (part := on_ranks(comm, workers, servers)) is None:
        return
    number = LAYOUTS.index((workers, servers)) + 3 * BOUNDS.index(staleness) + 2 * list(KINDS).index(kind)
    task, optimizer, more = CHOICES[number % len(CHOICES)]
    how = {"optimizer": optimizer, "staleness": staleness, "adapt_lr": bool(staleness) and number % 3 == 0, **more}
    check(part, TASKS[task], workers, servers, **KINDS[kind], **how)
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("staleness", (0, 1, inf))
def test_with_delay_1_two_rounds_have_the_same_weights_and_the_next_what_both_updated(comm, staleness):
    """Round 10 is computed with fresh weights, round 11 with the same, round 12 with those that 10 and 11 updated."""
    servers = 2 if comm.size > 3 else 1
    workers = min(5, comm.size - servers)
    if (part := on_ranks(comm, workers, servers)) is None:
        return
    how = {"optimizer": "sgd", "staleness": staleness, "delay": 1, "evaluates": False}
    replay, logs = check(part, Deep(), workers, servers, **how)
    places = [(server, worker) for server in range(servers) for worker in range(workers)]
    versions = by_rank_0(part, lambda: [[replay.version(*place, step) for step in (10, 11, 12)] for place in places])
    part.Free()
    for (server, worker), (tenth, eleventh, twelfth) in zip(places, versions):
        pulled = {e["clock"]: e["version"] for e in logs[server] if e["do"] == "pull" and e["worker"] == worker}
        made = {(w, e["clock"]): e["version"] for e in logs[server] if e["do"] == "apply" for w in e["workers"]}
        assert (tenth, eleventh, twelfth) == (pulled[10], pulled[10], pulled[12]) and 11 not in pulled
        assert made[worker, 9] <= tenth < made[worker, 10] < made[worker, 11] <= twelfth
        if staleness == 0:
            assert (tenth, twelfth) == (10, 12) and {made[w, 11] for w in range(workers)} == {12}
