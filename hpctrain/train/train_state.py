"""What a run has come to, beside its weights and its optimizer: the part of a checkpoint that is not tensors."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpctrain.train import checkpoint_files as files
from hpctrain.train.checkpoint_files import CheckpointError
from hpctrain.train.resume import fits

REMEMBERED = 1000  # steps whose times count in the median
FORGOTTEN = ("step_seconds",)  # times of steps that other ranks may have made


@dataclass
class TrainState:
    """The only mutable state of a run besides weights and optimizer."""

    step: int = 0
    rows: int = 0
    skipped_steps: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    seconds: float = 0.0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    evaluated_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None  # of the metric that --early-stop watches
    best_step: int | None = None
    evaluations_since_best: int = 0
    stopped_early: bool = False

    def told(self) -> dict[str, Any]:
        """What others may go on from."""
        return {name: value for name, value in asdict(self).items() if name not in FORGOTTEN}

    def forget_best(self) -> None:
        """What --early-stop has seen: it goes by another rule from here on."""
        self.best = self.best_step = None
        self.evaluations_since_best, self.stopped_early = 0, False


def read_state(folder: Path, manifest: Mapping[str, Any]) -> TrainState:
    """That of a checkpoint. CheckpointError where the manifest does not say what it should."""
    known = {each.name for each in fields(TrainState)} - set(FORGOTTEN)
    state = manifest["state"]
    if state.keys() != known:
        raise CheckpointError(f"{folder / files.MANIFEST}: damaged, state: {', '.join(sorted(known))} are expected")
    wrong = [each.name for each in fields(TrainState) if each.name in state and not fits(each.type, state[each.name])]
    wrong += [name for name, value in state.items() if type(value) is int and value < 0]
    if not wrong and not all(fits(float | None, each) for each in state["metrics"].values()):
        wrong.append("metrics")
    if state["step"] != manifest["step"]:
        wrong.append("step")
    if not all(fits(float, each) and each >= 0 for each in manifest["items_seen"]):
        wrong.append("items_seen")
    if wrong:
        raise CheckpointError(f"{folder / files.MANIFEST}: damaged, {wrong[0]} is not what a run has")
    return TrainState(**state)
