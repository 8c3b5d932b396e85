"""The runs that are made on a device and on the processor, and how near their losses have to be.

In float32 both sides round each product and sum to 2^-24, but add up in another order. A loss is a mean over hundreds
of items, each made of sums of at most some hundred numbers, so with equal weights, in the first step, it is off by some
10^-7 of itself, and 10^-5 leaves room. From then on weights differ by the rate times what gradients are off by: with
sgd, which neither divides by small numbers nor turns a sign into a step, 10 times that for a few steps.
With bf16-mixed products round to 2^-9, each side to its own: a hundredth.
"""

from __future__ import annotations

import json
from pathlib import Path

FIRST, LATER, MIXED = 1e-5, 1e-4, 1e-2  # relative to the loss on the processor
SGD = ["--optimizer", "sgd", "--lr", "0.02", "--eval-batches", "1", "--steps", "5"]
OPTIONS = [word for option in ("layers=6", "width=64", "context=32") for word in ("--task-option", option)]
TEXT = [*SGD, *OPTIONS, "--batch-size", "16"]
RATINGS = [*SGD, "--task", "ratings", "--batch-size", "256"]
BF16 = ["--precision", "bf16-mixed"]
CUT = ["--stages", "2", "--num-microbatches", "4"]
SCHEDULES = ("naive", "f-then-b", "1f1b", "1f1b-interleaved", "zb-h1", "1f1b-async", "2bw")
RUNS = {  # by number of ranks
    1: {"alone": TEXT, "alone-bf16": [*TEXT, *BF16], "alone-ratings": RATINGS},
    2: {
        "replicas": TEXT,
        "replicas-bf16": [*TEXT, *BF16],
        **{schedule: [*TEXT, *CUT, "--schedule", schedule] for schedule in SCHEDULES},
        "1f1b-bf16": [*TEXT, *CUT, *BF16],
        "server": [*TEXT, "--servers", "1"],
        "server-ratings": [*RATINGS, "--servers", "1"],
    },
    8: {
        "replicas": TEXT,
        "hybrid": [*TEXT, "--stages", "4", "--num-microbatches", "4", "--batch-size", "32"],
        "hybrid-zb-h1": [*TEXT, *CUT, "--schedule", "zb-h1", "--batch-size", "32"],
        "hybrid-bf16": [*TEXT, *CUT, *BF16, "--batch-size", "32"],
        "servers": [*TEXT, "--servers", "2", "--batch-size", "18"],
        "servers-worker": [*TEXT, "--servers", "2", "--update", "worker", "--batch-size", "18"],
        "servers-ratings": [*RATINGS, "--servers", "2"],
        "replicas-ratings": RATINGS,
    },
}


def losses(folder: Path) -> list[float]:
    """Of each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "items" in line]


def tolerances(name: str) -> tuple[float, float]:
    """Of the first step and of later ones of a run. A step of 1f1b-async is several updates, the first one too."""
    if "bf16" in name:
        return MIXED, MIXED
    return (LATER if "async" in name else FIRST), LATER


def faults(expected: list[float], found: list[float], name: str) -> list[str]:
    """Where `found` is too far from `expected` for the run `name`, step by step, and where steps are missing."""
    if not expected or len(expected) != len(found):
        return [f"{len(found)} steps instead of {len(expected)}"]
    wrong = []
    for step, (right, loss) in enumerate(zip(expected, found, strict=True), 1):
        tolerance = tolerances(name)[step > 1]
        if not abs(loss - right) <= tolerance * abs(right):  # not: also of NaN
            wrong.append(f"step {step}: loss {loss:.8g} instead of {right:.8g}, {tolerance:g} of it are allowed")
    return wrong
