"""A pipeline in a loop of one's own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.random_state import generators_kept, random_state_kept
from hpctrain.model.structure import map_tensors, tensors_in
from hpctrain.plan.grid import split_evenly
from hpctrain.train.batches import MicroBatch
from hpctrain.train.build import build_executor
from hpctrain.train.devices import numbered
from hpctrain.train.evaluation import outputs_of
from hpctrain.train.layout import MICROBATCHES_A_STAGE

Loss = Callable[[Any, Any], Any]
SETTINGS = (
    *("chunks", "pipeline_warmup", "vertical_sync", "stage_split", "recompute"),
    *("clip_norm", "on_nan", "bucket_bytes", "precision", "seed"),
)


class Pipeline:
    """A model whose layers lie on the stages of `mesh`, one group of them on each rank: Mesh(stages=4), for example.

        with Mesh(stages=2) as mesh:
            pipeline = Pipeline(layers, loss, mesh, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
            for inputs, targets in batches:
                mean_loss = pipeline.step(inputs, targets)

    `layers`: a list of functions that each build one layer, of which a rank calls those of its own layers; or modules,
    or a torch.nn.Sequential. `loss(outputs, targets)` gives the mean over the rows, a scalar, or (the sum over items,
    their number). `optimizer(parameters)` makes the optimizer of this rank's layers.

    `schedule` is a name of `--schedule`, `num_microbatches` the pieces of a replica's rows (default: 4 for each stage).
    `example`, a few rows of inputs, lets layers be shared out by counted flops; without it parameters count. `ties` are
    pairs of names, such as ("layers.0.weight", "layers.5.weight"), of parameters that are one. Layers come to this
    rank's `device`, such as "cuda:0", and so do rows where they are not there already. `settings` are flags of
    the command line: chunks, pipeline_warmup, vertical_sync, stage_split, recompute, clip_norm, on_nan, bucket_bytes,
    precision (by default that of the modules), seed (of weights that functions make). A bucket size that the mesh's
    `tuning` has takes the place of the default.

    Replicas, more ranks than stages, sum their gradients; each has rows of its own. ValueError for settings that do not
    fit, RuntimeError, on all ranks alike, for a model that does not fit. What a layer or the loss raises on one rank is
    raised there alone: `Mesh()` then ends all ranks. Collective.
    """

    def __init__(
        self,
        layers: Iterable[Callable[[], nn.Module] | nn.Module],
        loss: Loss,
        mesh: Mesh,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        example: Any = None,
        ties: Sequence[tuple[str, str]] = (),
        device: torch.device | str = "cpu",
        **settings,
    ):
        if unknown := sorted(settings.keys() - SETTINGS):
            raise TypeError(f"Pipeline: no setting is called {unknown[0]}; there is {', '.join(SETTINGS)}")
        given, num_stages = list(layers), mesh.grid.num_stages
        if num_microbatches is None:
            num_microbatches = 1 if schedule == "naive" else MICROBATCHES_A_STAGE * num_stages
        if "precision" not in settings:
            settings["precision"] = _precision(given)
        if mesh.tuning.bucket_bytes is not None:
            settings.setdefault("bucket_bytes", mesh.tuning.bucket_bytes)
        config = Config(stages=num_stages, schedule=schedule, num_microbatches=num_microbatches, **settings)
        self._rows = Rows(mesh.replica, num_microbatches)
        self._mesh, self._loss, self._num_steps = mesh, loss, 0
        model = _Model([_factory(layer) for layer in given], ties, self._summed)
        with random_state_kept():
            self._executor = build_executor(
                config,
                model,
                mesh,
                self._rows,
                optimizer,
                None if example is None else lambda: example,
                device=numbered(device),
            )

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's; None where its layers have no parameter that requires a gradient."""
        return self._executor.optimizer

    @property
    def executor(self):
        """What runs the schedule: its peaks, times and watchers."""
        return self._executor

    def step(self, inputs: Any, targets: Any) -> float | None:
        """Trains on the rows of this replica, given alike on all its stages; returns the mean loss over all replicas.

        None where there is nothing to count. RuntimeError where loss or gradients are not finite. Collective.
        """
        return self.run([(inputs, targets)])[0]

    def run(self, batches: Iterable[tuple[Any, Any]]) -> list[float | None]:
        """As many steps, in one go; returns what `step` would. All batches are in memory at once. Collective.

        A schedule without a flush empties the pipeline at the end only, so it needs this.
        """
        batches = list(batches)
        first, self._num_steps = self._num_steps, self._num_steps + len(batches)
        self._rows.give(first, batches)
        losses: list[float | None] = []
        self._executor.update.on_result = lambda result: losses.append(result.loss)
        with generators_kept(self._executor.stage.device):  # each stage sets them; the program's go on alike
            self._executor.run_steps(first, len(batches))
        return losses

    def evaluate(self, inputs: Any, targets: Any) -> float | None:
        """The mean loss over all rows, with nothing trained; given as for `step`. Collective."""
        self._rows.give(0, [(inputs, targets)])
        stage, update = self._executor.stage, self._executor.update
        pieces = (self._rows.microbatch(0, index) for index in range(self._rows.num_microbatches))
        batches = [piece for piece in pieces if piece is not None]
        total = [0.0, 0.0]
        with update.statistics.averaged(update.items_seen), stage.evaluating():
            pairs = ((batch.inputs, batch.targets) for batch in batches)
            for outputs, wanted in outputs_of(stage, self._executor.passes.links, self._mesh, pairs, len(batches)):
                value, count = self._summed(outputs, wanted)
                total = [total[0] + float(value), total[1] + float(count)]
        told = self._mesh.everybody.all_gather_json(total)
        value, count = (sum(column) for column in zip(*told))
        return value / count if count else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's weights and buffers, named as torch.nn.Sequential over all layers has them: `3.weight`.

        Running statistics of BatchNorm are those of this replica.
        """
        state = self._executor.stage.state()
        return {name.removeprefix("layers."): tensor.detach() for name, tensor in state.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over the weights of this rank's layers from `state`, which may hold those of others too. KeyError."""
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                tensor.copy_(state[name])

    def close(self) -> None:
        """Ends its messages, and gives their communicator back. The mesh does it too, when it is closed. Collective."""
        self._executor.passes.links.close()

    def _summed(self, outputs: Any, targets: Any) -> Any:
        found = self._loss(outputs, targets)
        if isinstance(found, torch.Tensor):
            num_rows = count_rows(targets)
            return found * num_rows, num_rows
        return found


class Rows:
    """Batches as Batches has them, of rows that somebody gives step by step."""

    def __init__(self, replica: int, num_microbatches: int):
        self.num_microbatches, self.seconds = num_microbatches, 0.0
        self._first = replica * num_microbatches

    def give(self, first_step: int, batches: list[tuple[Any, Any]]) -> None:
        """The rows of the steps to come. ValueError where inputs and targets are not equally many."""
        self._first_step, self._batches, self._pieces = first_step, batches, []
        for inputs, targets in batches:
            num_rows = count_rows(inputs)
            if count_rows(targets) != num_rows:
                raise ValueError(f"Pipeline: {num_rows} rows of inputs, {count_rows(targets)} of targets; give as many")
            self._pieces.append(split_evenly(num_rows, self.num_microbatches))

    def number(self, step: int, index: int) -> int | None:
        return self._first + index if self._pieces[step - self._first_step][index] else None

    def microbatch(self, step: int, index: int) -> MicroBatch | None:
        rows = self._pieces[step - self._first_step][index]
        if not rows:
            return None
        inputs, targets = (
            map_tensors(lambda tensor: tensor[rows.start : rows.stop], each)
            for each in self._batches[step - self._first_step]
        )
        return MicroBatch(inputs, targets, self._first + index)


def count_rows(batch: Any) -> int:
    """The length of its tensors. ValueError where there is none, or lengths differ."""
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(batch)}
    if len(lengths) != 1:
        raise ValueError(f"Pipeline: a batch of tensors with {sorted(lengths) or 'no'} rows; give all equally many")
    return lengths.pop()


class _Model:
    """What build_executor wants of a task."""

    def __init__(self, factories: list[Callable[[], nn.Module]], ties: Sequence[tuple[str, str]], loss: Loss):
        self._factories, self._ties, self.loss = factories, ties, loss

    def layers(self) -> list[Callable[[], nn.Module]]:
        return self._factories

    def ties(self) -> Sequence[tuple[str, str]]:
        return self._ties


def _factory(layer: Callable[[], nn.Module] | nn.Module) -> Callable[[], nn.Module]:
    return (lambda: layer) if isinstance(layer, nn.Module) else layer


def _precision(layers: list) -> str:
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    dtypes = {p.dtype for module in modules for p in module.parameters() if p.is_floating_point()}
    if odd := dtypes - {torch.float32, torch.float64}:
        raise ValueError(f"Pipeline: modules in {odd.pop()}; give float32 or float64 ones, or precision='bf16-mixed'")
    return "float64" if torch.float64 in dtypes else "float32"
