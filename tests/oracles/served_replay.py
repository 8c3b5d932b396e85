"""A run with parameter servers done again in one process, from the logs of its servers. Imports nothing of hpctrain.

Every version of every server's part is kept. Pulls say with which of them a worker computed a step, so its gradient is
computed with exactly these; updates follow in the order of the log.
"""

from collections import deque
from collections.abc import Sequence

import torch

from tests.oracles.served_log import DENSE, Run, walk


class Optimizer:
    """Steps some rows of `values` (n, width), each with state and a number of steps of its own; in place."""

    def __init__(self, name: str, momentum: float, weight_decay: float, values: torch.Tensor):
        self.name, self.momentum, self.weight_decay, self.values = name, momentum, weight_decay, values
        self.average, self.square = torch.zeros_like(values), torch.zeros_like(values)
        self.steps = torch.zeros(len(values), 1, dtype=torch.float64)

    def step(self, chosen: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
        values = self.values[chosen]
        self.steps[chosen] += 1
        if self.name == "adamw":
            values = values * (1 - lr * self.weight_decay)
        else:
            gradient = gradient + self.weight_decay * values
        self.values[chosen] = values - lr * self._direction(chosen, gradient)

    def _direction(self, chosen: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if self.name == "sgd":
            return gradient
        if self.name == "momentum":
            self.average[chosen] = self.momentum * self.average[chosen] + gradient
            return self.average[chosen]
        if self.name == "adagrad":
            self.square[chosen] += gradient**2
            return gradient / (self.square[chosen].sqrt() + 1e-10)
        assert self.name in ("adam", "adamw"), self.name
        self.average[chosen] = 0.9 * self.average[chosen] + 0.1 * gradient
        self.square[chosen] = 0.999 * self.square[chosen] + 0.001 * gradient**2
        first, second = (1 - beta ** self.steps[chosen] for beta in (0.9, 0.999))
        return self.average[chosen] / first / ((self.square[chosen] / second).sqrt() + 1e-8)


class Part:
    """What a server holds: each version of its dense segments and of its rows."""

    def __init__(self, run: Run, server: int):
        self.run, self.server, self.segments = run, server, run.parts[server]
        self.dense = [
            Optimizer(*run.optimizer, run.weights[name].reshape(-1, 1)[start:stop].clone())
            for name, start, stop in self.segments
        ]
        self.tables = [Optimizer(*run.table_optimizer, first.clone()) for first in run.tables.values()]
        self.history: list[list[torch.Tensor]] = []
        self.keep()

    def keep(self) -> None:
        self.history.append([each.values.clone() for each in (*self.dense, *self.tables)])

    def fill(self, name: str, flat: torch.Tensor, version: int) -> None:
        """Puts this server's share of a weight where it belongs."""
        for (segment, start, stop), values in zip(self.segments, self.history[version]):
            if segment == name:
                flat[start:stop] = values[:, 0]

    def rows(self, table: int, version: int) -> torch.Tensor:
        return self.history[version][len(self.dense) + table]

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[ids % len(self.run.parts) == self.server]

    def apply(self, pushed: list, lr: float) -> None:
        """`pushed`: (gradients by name, ids by table, loss, items) of each worker, one update together."""
        items = sum(each[3] for each in pushed)
        for (name, start, stop), optimizer in zip(self.segments, self.dense):
            parts = [each[0][name].reshape(-1, 1)[start:stop] for each in pushed if each[0].get(name) is not None]
            if items and parts:
                optimizer.step(torch.arange(stop - start), sum(parts) / items, lr)
        for name, optimizer in zip(self.run.tables, self.tables):
            parts = [(each[0][name], self.own(each[1][name])) for each in pushed if each[0].get(name) is not None]
            if items and parts:
                ids = torch.cat([ids for _, ids in parts]).unique()
                optimizer.step(ids, sum(gradient for gradient, _ in parts)[ids] / items, lr)
        self.keep()


class Replay:
    """The run again: `weights` and `tables` at its end, `losses` of its rounds, `versions` by server as `walk` has."""

    def __init__(self, run: Run, logs: Sequence[Sequence[dict]]):
        self.run, self.versions = run, [walk(run, server, log) for server, log in enumerate(logs)]
        self.parts = [Part(run, server) for server in range(len(logs))]
        self._pushed: dict[tuple[int, int], tuple] = {}
        waiting = [deque(event for event in log if event["do"] == "apply") for log in logs]
        while any(waiting):
            before = sum(map(len, waiting))
            for part, events in zip(self.parts, waiting):
                while events and all(self._computed(worker, events[0]["clock"]) for worker in events[0]["workers"]):
                    event = events.popleft()
                    part.apply([self._pushed[worker, event["clock"]] for worker in event["workers"]], event["lr"])
            assert sum(map(len, waiting)) < before, "a worker read what was not there yet"
        last = [len(part.history) - 1 for part in self.parts]
        self.weights, self.tables = self._dense(last), {name: first.clone() for name, first in run.tables.items()}
        for table, values in enumerate(self.tables.values()):
            for server, part in enumerate(self.parts):
                values[server :: len(self.parts)] = part.rows(table, -1)[server :: len(self.parts)]
        rounds = [[self._pushed[w, clock] for w in range(run.num_workers)] for clock in range(run.stops[-1])]
        self.losses = [sum(each[2] for each in those) / sum(each[3] for each in those) for those in rounds]

    def version(self, server: int, worker: int, step: int) -> int:
        """Of the dense weights that a worker computed a step with."""
        refresh = self.run.refresh(step)
        return self.versions[server][worker, DENSE, refresh] if refresh and self.run.parts[server] else 0

    def _dense(self, versions: Sequence[int]) -> dict[str, torch.Tensor]:
        flat = {name: torch.full((first.numel(),), torch.nan).to(first) for name, first in self.run.weights.items()}
        for name, values in flat.items():
            for part, version in zip(self.parts, versions):
                part.fill(name, values, version)
        return {name: values.view(self.run.weights[name].shape) for name, values in flat.items()}

    def _computed(self, worker: int, step: int) -> bool:
        """Whether a worker's step is computed, now or before: not while a version that it read is still to come."""
        if (worker, step) in self._pushed:
            return True
        run, versions = self.run, [self.version(server, worker, step) for server in range(len(self.parts))]
        rows = [
            (table, server, read[worker, table, step])
            for server, read in enumerate(self.versions)
            for table in range(len(run.tables))
            if (worker, table, step) in read
        ]
        needed = [*enumerate(versions), *((server, version) for _, server, version in rows)]
        if any(version >= len(self.parts[server].history) for server, version in needed):
            return False
        values, ids, names = self._dense(versions), run.ids(step, worker), list(run.tables)
        values |= {name: torch.full_like(first, torch.nan) for name, first in run.tables.items()}
        for table, server, version in rows:
            own = self.parts[server].own(ids[names[table]])
            values[names[table]][own] = self.parts[server].rows(table, version)[own]
        self._pushed[worker, step] = self._push(values, ids, step, worker)
        return True

    def _push(self, values: dict[str, torch.Tensor], ids: dict, step: int, worker: int) -> tuple:
        leaves = {name: each.requires_grad_() for name, each in values.items()}
        result = self.run.compute(leaves, step, worker)
        if result is None:
            return {}, ids, 0.0, 0
        loss, items = result
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return dict(zip(leaves, gradients)), ids, float(loss.detach()), items
