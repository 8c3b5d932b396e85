"""What the logs of parameter servers say of a run, and what no run may break, whatever happened: how old what was read
may be, and that everything was asked and applied once. Imports nothing of hpctrain.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import torch

DENSE = -1


@dataclass
class Run:
    """What the caller says of a run.

    `stops`: steps before which all workers waited for all; the last is the end. `parts`: by server, (name, start, stop)
    of the flattened weights. `weights` and `tables` (in the order of their numbers): first values by name.
    `compute(values, step, worker)`: the sum of the loss and the number of items, None without data.
    `ids(step, worker)`: by table, the rows that it looks up. `looks(stop, worker)`: the same for each look at the
    tables outside training. `optimizer` and `table_optimizer`: arguments of Optimizer.
    """

    num_workers: int
    staleness: float
    stops: Sequence[int]
    parts: Sequence[Sequence[tuple[str, int, int]]]
    weights: Mapping[str, torch.Tensor]
    compute: Callable
    optimizer: tuple
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ids: Callable = lambda step, worker: {}
    looks: Callable = lambda stop, worker: []
    table_optimizer: tuple = ()
    delay: int = 0
    window: int = 0

    def first(self, step: int) -> int:
        """The last stop up to a step."""
        return max([0, *(stop for stop in self.stops if stop <= step)])

    def refresh(self, step: int) -> int:
        """The step whose dense weights this one computes with."""
        return max(self.first(step), step - step % (self.delay + 1))

    def clock(self, step: int) -> int:
        """At which a step reads."""
        return max(self.first(step), step - step % (self.delay + 1) - self.window)


def walk(run: Run, server: int, log: Sequence[dict]) -> dict[tuple[int, int, int], int]:
    """The version that each (worker, table, step) read on this server; asserts all that holds for any run."""
    wanted = {worker: expected_pulls(run, server, worker) for worker in range(run.num_workers)}
    counts, own, version, versions = [0] * run.num_workers, [[] for _ in range(run.num_workers)], 0, {}
    gone: list[int] = []
    for event in log:
        clock = event["clock"]
        if event["do"] == "apply":
            version += 1
            check_update(run, event, version, counts, own, versions)
            for worker in event["workers"]:
                counts[worker] += 1
                own[worker].append(version)
        elif event["do"] == "retire":
            assert clock == counts[event["worker"]] == run.stops[-1], f"left early: {event}"
            gone.append(event["worker"])
        else:
            worker, table, keys = event["worker"], event["table"], wanted[event["worker"]][event["table"], clock]
            assert keys, f"a pull too many: {event}"
            step = keys.popleft()
            waits = step is None or (table == DENSE and step in run.stops)  # for all
            check_read(run, event, version, counts, gone, 0 if waits else run.staleness)
            if waits and table == DENSE:
                each = 1 if run.staleness == 0 else run.num_workers
                assert version == each * step, f"not all and nothing else at {step}: {event}"
            versions[worker, table, step] = version
    missing = [(worker, key) for worker, keys in wanted.items() for key, left in keys.items() if left]
    assert not missing, f"pulls that are missing: {missing}"
    assert sorted(gone) == list(range(run.num_workers)) and set(counts) == {run.stops[-1]}, (gone, counts)
    return versions


def expected_pulls(run: Run, server: int, worker: int) -> dict[tuple[int, int], deque]:
    """By table and clock, the steps that will read, in order; None is a look outside training."""
    wanted: dict[tuple[int, int], deque] = defaultdict(deque)

    def on_server(ids) -> list[int]:
        return [table for table, name in enumerate(run.tables) if (ids[name] % len(run.parts) == server).any()]

    for first, stop in zip([0, *run.stops], run.stops):
        for step in range(first, stop):
            if run.parts[server] and step > first and run.refresh(step) == step:
                wanted[DENSE, run.clock(step)].append(step)
            for table in on_server(run.ids(step, worker)):
                wanted[table, run.clock(step)].append(step)
        if run.parts[server]:
            wanted[DENSE, stop].append(stop)
        for ids in run.looks(stop, worker):
            for table in on_server(ids):
                wanted[table, stop].append(None)
    return wanted


def check_read(run: Run, event: dict, version: int, counts: list[int], gone: list[int], bound: float) -> None:
    """A read at clock c sees all that is stamped up to c - bound - 1, and everything of its own before c."""
    clock, running = event["clock"], [n for worker, n in enumerate(counts) if worker not in gone]
    assert event["version"] == version, f"not {version}: {event}"
    assert event["gap"] == max(0, clock - min(running)) <= bound, f"a gap, bound {bound}, clocks {counts}: {event}"
    assert min(counts) >= clock - bound, f"bound {bound}, but seen are {counts}: {event}"
    assert counts[event["worker"]] >= clock, f"its own are {counts}: {event}"
    assert run.staleness or version == clock, f"rounds gathered, so exactly {clock} should be seen: {event}"


def check_update(run: Run, event: dict, version: int, counts, own, versions) -> None:
    """Each worker's iterations in order; where nothing is kept or asked early, few updates overtake one."""
    workers, clock = event["workers"], event["clock"]
    assert event["version"] == version, f"not {version}: {event}"
    assert workers == list(range(run.num_workers)) or (run.staleness and len(workers) == 1), f"not all: {event}"
    assert all(counts[worker] == clock for worker in workers), f"out of turn: clocks {counts}, {event}"
    if run.staleness:
        worker = workers[0]
        dense = [(step, seen) for (who, table, step), seen in versions.items() if (who, table) == (worker, DENSE)]
        rows = [
            seen for (who, table, step), seen in versions.items() if table != DENSE and (who, step) == (worker, clock)
        ]
        before = [seen for step, seen in sorted(dense, key=lambda pair: pair[0]) if step <= clock]
        read = min([*rows, *(before or [0])[-1:]])
        lag = version - 1 - read - sum(made > read for made in own[worker])
        assert event["lag"] == lag, f"the lag is {lag}: {event}"
        largest = inf if run.staleness == inf else (2 * run.staleness + 1) * (run.num_workers - 1)
        assert run.delay or run.window or lag <= largest, f"{lag} updates overtook it, bound {largest}: {event}"
