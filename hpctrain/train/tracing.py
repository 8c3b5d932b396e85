"""One rank's spans for the trace: what its executor did, and what was on its way meanwhile."""

from pathlib import Path

from hpctrain.comm.clock import Clock
from hpctrain.comm.mesh import Mesh
from hpctrain.plan.schedule import COMPUTES, Action, Op
from hpctrain.report.summary import write_json
from hpctrain.report.trace import RankTrace, Trace, bubble_rate, chrome, hidden_share
from hpctrain.train.executor import Executor

WAITS = (Op.PULL, Op.RECV_F, Op.RECV_B, Op.REDUCE, Op.TIE, Op.AGREE, Op.PUSH)


class Tracer:
    """Watches `executor` from here on."""

    def __init__(self, executor: Executor):
        self.trace = Trace()
        self._executor, self._step = executor, 0
        executor.watchers.append(self._watch)
        executor.passes.links.watch(self._sent)

    def _watch(self, action: Action, step: int, began: float, ended: float) -> None:
        self._step = step = step + 1  # as metrics.jsonl counts
        if action.op in COMPUTES:
            self.trace.add("compute", str(action), began, ended, step)
        elif action.op is Op.STEP:
            self._add_step(str(action), began, ended, step)
        elif action.op in WAITS:
            self.trace.add("waiting", str(action), began, ended, step)
        if action.op is Op.REDUCE and self._executor.update.mesh.data.size > 1:
            for number, sum_ in enumerate(self._executor.update.reduction.collectives):
                self.trace.add("communication", f"gradients {number}", sum_.began, sum_.began + sum_.seconds, step)

    def _add_step(self, name: str, began: float, ended: float, step: int) -> None:
        """An update; where weights of other replicas come at its end, it waits from there on."""
        gathers = [each for each in self._executor.update.gathers if each.began >= began]
        stepped = min((each.began for each in gathers), default=ended)
        self.trace.add("compute", name, began, stepped, step)
        if gathers:
            self.trace.add("waiting", "GATHER", stepped, ended, step)
        for number, each in enumerate(gathers):
            self.trace.add("communication", f"weights {number}", each.began, each.began + each.seconds, step)

    def _sent(self, name: str, began: float, ended: float) -> None:
        self.trace.add("communication", name, began, ended, self._step)

    def write(self, path: Path, clock: Clock, mesh: Mesh) -> dict:
        """One file of all ranks, by rank 0; returns what the summary says of it. Collective."""
        events, dropped = self.trace.events, self.trace.dropped
        own = RankTrace(mesh.rank, mesh.stage, mesh.replica, clock.offset, clock.error, events, dropped)
        told = mesh.world.gather_json(own)
        if told is None:
            return {}
        traces = [RankTrace(*each) for each in told]
        write_json(path, chrome(traces), indent=None)
        return {
            "bubble_rate": bubble_rate(traces),
            "hidden_share": hidden_share(traces),
            "clock_error": max(trace.error for trace in traces),
            "dropped_events": sum(trace.dropped for trace in traces),
        }
