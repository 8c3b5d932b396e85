"""What rank 0 notes goes to all its places: file, console, curves."""

import json
import subprocess
import sys

import pytest

from hpctrain.report.recorder import Recorder

STEP = {"step": 1, "loss": None, "lr": 0.5, "gradient_norm": None, "seconds": 0.5, "rows_per_second": 2.0}


def test_steps_and_evaluations_are_written_printed_and_drawn(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder(tmp_path, 2, False, tensorboard=True)
    recorder.note(STEP)
    recorder.note({**STEP, "step": 2, "loss": 1.5, "gradient_norm": float("inf")})
    recorder.note({"step": 2, "eval": {"accuracy": 0.75}, "seconds": 1.0})
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2] and lines[2]["eval"] == {"accuracy": 0.75}
    assert capsys.readouterr().out.splitlines()[-1] == "step 2/2  held-out accuracy 0.7500"
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {tag: [(event.step, event.value) for event in curves.Scalars(tag)] for tag in curves.Tags()["scalars"]}
    assert points == {
        "train/loss": [(2, 1.5)],
        "train/learning_rate": [(1, 0.5), (2, 0.5)],
        "speed/step_seconds": [(1, 0.5), (2, 0.5)],
        "speed/rows_per_second": [(1, 2.0), (2, 2.0)],
        "eval/accuracy": [(2, 0.75)],
    }, "what is None or not finite has no point"


def test_a_skipped_step_is_told_once_and_an_early_stop_as_well(tmp_path, capsys):
    recorder = Recorder(tmp_path, 3, False)
    for step in (1, 2):
        recorder.note({**STEP, "step": step, "skipped": f"step {step}: not finite: the loss on rank 0"})
    recorder.note({"step": 2, "stopped_early": "loss no better in 3 evaluations, best 4.0000 at step 2"})
    recorder.close()
    told = capsys.readouterr().out
    assert (
        told.count("skipped step") == 1 and "skipped step 1: not finite: the loss on rank 0 (this is told once" in told
    )
    assert told.endswith("stopped early: loss no better in 3 evaluations, best 4.0000 at step 2\n")


@pytest.mark.parametrize("tensorboard", (False, True))
def test_curves_need_no_torch(tensorboard, tmp_path):
    program = f"""
import sys
from pathlib import Path
from hpctrain.report.recorder import Recorder
recorder = Recorder(Path({str(tmp_path)!r}), 1, False, {tensorboard})
recorder.note({STEP!r})
recorder.close()
print(*({{"torch", "tensorboard"}} & sys.modules.keys()))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[-1] == ("tensorboard" if tensorboard else "")
