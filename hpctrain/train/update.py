"""From the gradients of a step to new weights, all ranks together: what happens once an update.

Gradients are those of the sum of item losses. Items are counted beside them, and one multiplication by 1 / items
happens at STEP: ragged batches, masks, schedules and layouts all give the gradient of the mean over the items of the
global batch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from hpctrain.comm.collective import Collective
from hpctrain.comm.mesh import Mesh
from hpctrain.model.finite import Finite
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.optimizer_shard import OptimizerShard
from hpctrain.model.stage import Stage
from hpctrain.plan.program import NOTHING
from hpctrain.plan.schedule import Action, Op
from hpctrain.train.agreement import Agreement
from hpctrain.train.errors import AgreedError, NotFinite
from hpctrain.train.feedback import FeedbackReduction, reduction_of
from hpctrain.train.lookups import Lookups, Rows
from hpctrain.train.reduction import Reduction
from hpctrain.train.sharded_reduction import ShardedReduction
from hpctrain.train.statistics import RunningStatistics
from hpctrain.train.tied import TiedWeights


@dataclass
class StepResult:
    """What all ranks know after a step: `loss` is the mean over `items`, None when there were none.

    `gradient_norm` is that before clipping, None without clipping. `stop`: a rank was asked to leave.
    """

    loss: float | None
    items: float
    skipped: str | None = None
    gradient_norm: float | None = None
    stop: bool = False


class Update:
    """Synchronous: all micro-batches of a step, all replicas and all stages, then one step of the optimizer.

    `tied` knows the parameters that have copies on other stages; `names` are all parameters of the model, its tables
    included, which `lookups` has.
    `on_result` is told of each step, `rate(step)` gives its learning rate (else the optimizer's own stays).
    """

    served = NOTHING  # what of the model servers hold
    steps = True  # whether this rank's optimizer does
    gathers: Sequence[Collective] = ()  # by which STEP brings weights that other replicas stepped

    def __init__(
        self,
        stage: Stage,
        gradients: FlatGradients,
        optimizer: torch.optim.Optimizer | None,
        mesh: Mesh,
        names: list[str],
        tied: TiedWeights,
        on_nan: str = "stop",
        clip_norm: float | None = None,
        lookups: Lookups | None = None,
        allreduce: str = "auto",
        compress: str = "none",
    ):
        self.lookups = lookups
        self._rows: Rows = {}  # sums over all replicas
        self.stage, self.gradients, self.optimizer, self.mesh = stage, gradients, optimizer, mesh
        self.tied, self.on_nan, self.clip_norm = tied, on_nan, clip_norm
        self.reduction = self._build_reduction(allreduce, compress)
        self.stepped: FlatGradients | OptimizerShard = gradients  # what the optimizer of this rank steps with
        self._looks = mesh.replica == 0  # all replicas hold the bits of the same sums, so one of them looks at them
        self.statistics = RunningStatistics(stage.named_layers(), mesh.data)
        self.remembers = on_nan == "skip"  # what a step changes before it is agreed on
        self._parameters = list(stage.named_parameters().values())
        self.items_seen = 0.0  # by this replica, which its running statistics weigh by
        self.on_result: Callable[[StepResult], None] = lambda result: None
        self.rate: Callable[[int], float] | None = None
        self.is_asked_to_stop: Callable[[], bool] = lambda: False  # this rank, by a signal
        self._agreement = Agreement(names, mesh)
        gradients.on_ready, gradients.on_gradient = self._start_reduction, mesh.progress.poll
        self.methods = {Op.REDUCE: self._reduce, Op.TIE: self._tie, Op.AGREE: self._agree, Op.STEP: self._step}

    def _build_reduction(self, algorithm: str, compress: str) -> Reduction | ShardedReduction | FeedbackReduction:
        return reduction_of(self.gradients, self.mesh.data.ring, algorithm, compress)

    def begin(self, step: int) -> None:
        """What comes next belongs to `step` (from 0)."""
        self.step_number = step
        if self.remembers:
            self.statistics.remember()
        self.gradients.zero()
        self._agreement.clear()
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._own = Finite(self.gradients)
        self.load(step)

    def load(self, step: int) -> None:
        """Has the rows of tables that a step looks up."""
        if self.lookups is not None:
            self.lookups.load(step)

    def begin_at(self, step: int) -> None:
        """So many steps were made before this rank began."""

    def read_again(self, step: int) -> None:
        """What servers hold after so many steps. Collective with the other workers."""

    def num_made(self, num_told: int) -> int:
        """Steps that are in the weights of this rank; of `num_told` it has heard the result."""
        return num_told

    def forget_step(self) -> None:
        """The one that was begun and is not made, where it `remembers`."""
        if self.remembers:
            self.statistics.restore()

    def run(self, first: int, stop: int) -> None:
        """Steps from `first` to before `stop` come next."""

    def stop_after(self, step: int) -> None:
        """That one is the last of them."""

    def end(self) -> None:
        """They are done."""

    def weights(self, microbatch: int) -> Mapping[str, torch.Tensor] | None:
        """What the micro-batch is computed with; None: the parameters themselves."""
        return None

    def all_weights(self) -> Iterable[torch.Tensor]:
        return self._parameters

    def addresses(self) -> set[int]:
        """Of the storages that weights lie in."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._parameters}

    @property
    def num_versions(self) -> int:
        """Versions of the weights held at once, at most."""
        return 1

    def add_loss(self, microbatch: int, loss: torch.Tensor, items: float) -> None:
        """The sum over the items of a micro-batch of this rank: a number that a device may not have yet."""
        self._losses.append((loss, items))

    def note_detached(self, microbatch: int) -> None:
        """The loss of a micro-batch depends on no parameter. Those of all the others may."""

    def tell(self, microbatch: int) -> list[torch.Tensor]:
        """What the stage before should know beside the gradients."""
        return []

    def learn(self, microbatch: int, told: list[torch.Tensor]) -> None:
        """What the stage behind told beside the gradients."""

    def _start_reduction(self, number: int) -> None:
        """A bucket is complete: look at it while it is still this rank's own, then let it travel."""
        self._own.look_at(self.gradients.buckets[number])
        self.reduction.start(number)

    def _reduce(self, action: Action) -> None:
        self.gradients.flush()
        self.reduction.wait()
        self._sum_rows()

    def _sum_rows(self) -> None:
        if self.lookups is not None:
            self._rows = self.lookups.sum_over_replicas(self.mesh)

    def _tie(self, action: Action) -> None:
        self.tied.add_up(self.gradients)

    def _agree(self, action: Action) -> None:
        for loss, items in self._losses:
            self._agreement.add_loss(float(loss), items)
        for name in self._own.not_finite():
            self._agreement.report(self.tied.canonical(name))
        touched = (name for name, touched in self.gradients.touched.items() if touched)
        self._agreement.touch(map(self.tied.canonical, touched))
        self._agreement.touch(self._rows)
        if self._looks:
            self._look_at_sums()
        if self.is_asked_to_stop():
            self._agreement.ask_to_stop()
        self._agreement.exchange()

    def _look_at_sums(self) -> None:
        """Every share was finite; is their sum? And what does it add to the norm?"""
        dense, rows = self.stepped, self._rows if self.mesh.replica == 0 else {}
        summed = self.mesh.data.size > 1 or self.tied.adds_up
        looked = Finite(dense)
        for bucket in dense.buckets if summed else ():
            looked.look_at(bucket)
        bad_rows = (name for name, (_, sums) in rows.items() if not torch.isfinite(sums).all())
        name = next(chain(looked.not_finite(), bad_rows), None)
        if name is not None:
            self._agreement.report(self.tied.canonical(name), of_sum=True)
        elif self._needs_norm:
            self._agreement.add_squared_norm(dense.squared_norm(self.tied.own(dense.parameters)))
            for _, sums in rows.values():
                self._agreement.add_squared_norm(float(torch.linalg.vector_norm(sums, dtype=torch.float64)) ** 2)

    @property
    def _needs_norm(self) -> bool:
        return self.clip_norm is not None and (self.mesh.grid.num_stages > 1 or self.lookups is not None)

    def _step(self, action: Action) -> None:
        agreed = self._agreement
        fault = agreed.fault()
        self.reduction.settle(fault is None and agreed.items > 0, self._names_of(agreed.touched()))
        if fault is not None:
            self.result = StepResult(None, agreed.items, f"step {self.step_number + 1}: {fault}", stop=agreed.stop)
            if self.on_nan == "stop":
                raise NotFinite(self.result.skipped)
            self.statistics.restore()
        else:
            self.items_seen += agreed.own_items
            mean = agreed.loss / agreed.items if agreed.items else None
            self.result = StepResult(mean, agreed.items, stop=agreed.stop)
            if agreed.items:
                self._change_weights()
        self.on_result(self.result)

    def _change_weights(self) -> None:
        touched, items = self._agreement.touched(), self._agreement.items
        if not touched:
            raise AgreedError(f"step {self.step_number + 1}: the loss depends on no parameter; is it detached?")
        self.stepped.scale(1.0 / items)
        self.stepped.attach(self._names_of(touched))
        scale = 1.0 / items
        if self._needs_norm:
            norm = self.result.gradient_norm = self._agreement.norm / items
            scale *= self.stepped.shorten(self.clip_norm, norm)
        elif self.clip_norm is not None:
            self.result.gradient_norm = self.gradients.clip(self.clip_norm)
        self.change(self.step_number)
        if self._rows:
            self.lookups.source.change(self._rows, self.learning_rate(self.step_number), scale)

    def _names_of(self, touched: Collection[str]) -> set[str]:
        """Those among what this rank steps that are `touched` somewhere, be it as a copy on another stage."""
        return {name for name in self.stepped.parameters if self.tied.canonical(name) in touched}

    def learning_rate(self, step: int) -> float:
        return self.optimizer.param_groups[0]["lr"] if self.rate is None else self.rate(step)

    def change(self, step: int) -> None:
        """Lets the optimizer step, with the learning rate of `step`. A stage without parameters has none."""
        if self.optimizer is not None:
            if self.rate is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate(step)
            self.optimizer.step()
