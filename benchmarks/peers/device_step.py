"""A step of a GPT on one rank and its device: by hpctrain's command, and by a plain torch loop over the same rows.

    python benchmarks/peers/device_step.py
    python benchmarks/peers/device_step.py --precision bf16-mixed

Both have the same weights, rows, loss and optimizer, in turns within one process; their losses show it. Both read
their rows themselves, and look at each loss, so that a step is over when its time is taken.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import above  # noqa: F401
import figures

NAME = "device_step.py"
WARMUP = 5  # steps whose time is not taken
TOLERANCES = {"float32": 1e-3, "bf16-mixed": 3e-2}  # of losses, which drift apart as both round
SIZES = (("layers", 12), ("width", 768), ("heads", 12), ("context", 512))
HEADER = f"{'pair':<6}{'hpctrain':>12}{'torch':>12}{'hpctrain / torch':>19}"


def command(flags, folder: Path) -> list[str]:
    """What hpctrain is told; without a device what it takes by itself."""
    told = [word for name, _ in SIZES for word in ("--task-option", f"{name}={getattr(flags, name)}")]
    told += ["--batch-size", str(flags.rows), "--steps", str(WARMUP + flags.steps), "--precision", flags.precision]
    told += ["--device", flags.device] if flags.device else []
    return ["--task", "text", "--run-dir", str(folder), "--eval-batches", "1", *told]


def by_hpctrain(flags) -> tuple[list[float], list[float]]:
    """Seconds and losses of all steps."""
    from hpctrain import cli

    with tempfile.TemporaryDirectory() as parent, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(parent, "run")
        if code := cli.main(command(flags, folder), None):
            raise figures.Refused(f"hpctrain ended with code {code}")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "items" in line]
    return [line["seconds"] for line in steps], [line["loss"] for line in steps]


def by_torch(flags) -> tuple[list[float], list[float]]:
    """The same of a plain loop, from the same weights, over the same rows."""
    import torch

    from hpctrain.config import Config
    from hpctrain.tasks.text import Text
    from hpctrain.train.batches import GlobalSampler
    from hpctrain.train.build import build_model
    from hpctrain.train.loader import Reader, Request

    task = Text(num_layers=flags.layers, width=flags.width, num_heads=flags.heads, context=flags.context)
    device = torch.device(flags.device or "cpu")
    model = torch.nn.Sequential(*build_model(Config(precision=flags.precision), task).layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=Config().lr, weight_decay=Config().weight_decay)
    dataset = task.dataset("train")
    sampler, reader = GlobalSampler(len(dataset), flags.rows, Config().seed), Reader(lambda: dataset, torch.float32)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=flags.precision == "bf16-mixed")
    seconds, losses = [], []
    for step in range(WARMUP + flags.steps):
        began = time.perf_counter()
        inputs, targets = (each.to(device) for each in reader[Request(tuple(sampler.rows(step)))])
        optimizer.zero_grad()
        with mixed:
            total, items = task.loss(model(inputs), targets)
            loss = total / items
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return seconds, losses


def difference(ours: list[float], torchs: list[float]) -> float:
    """The largest of two courses of losses, as a share of torch's; infinite where a step or a number is missing."""
    if len(ours) != len(torchs):
        return float("inf")
    found = [abs(mine / theirs - 1) for mine, theirs in zip(ours, torchs)]
    return max(each if each == each else float("inf") for each in found)


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags(NAME, __doc__.splitlines()[0], rank)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--precision", choices=tuple(TOLERANCES), default="float32", help="default: float32")
    numbers = (*SIZES, ("rows", 16), ("steps", 15), ("pairs", 5))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    flags = parser.parse_args(argv)
    if num_ranks > 1:
        raise ValueError(f"{num_ranks} ranks; start it without mpirun")
    for name, _ in numbers:
        if getattr(flags, name) < 1:
            raise ValueError(f"--{name} {getattr(flags, name)}: expected a whole number >= 1")
    if flags.device == "cuda":
        from hpctrain.comm.devices import visible_devices

        if not (found := visible_devices())[0]:
            raise ValueError(f"--device cuda: {found[1]}; expected cpu here")
    return flags


def run(flags) -> tuple[dict, str | None]:
    """All figures, and what is wrong with them."""
    sides = {"hpctrain": by_hpctrain, "torch": by_torch}
    print(f"GPT of {flags.layers} blocks, width {flags.width}; {flags.rows} rows of {flags.context}, {flags.precision}")
    print(HEADER, flush=True)
    pairs, apart = [], 0.0
    for number in range(flags.pairs):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        made = {name: sides[name](flags) for name in order}
        apart = max(apart, difference(made["hpctrain"][1], made["torch"][1]))
        pairs.append({name: statistics.median(seconds[WARMUP:]) for name, (seconds, _) in made.items()})
        each = "".join(f"{1e3 * pairs[-1][name]:>9.2f} ms" for name in sides)
        print(f"{number + 1:<6}{each}{pairs[-1]['hpctrain'] / pairs[-1]['torch']:>19.3f}", flush=True)
    ratios = [pair["hpctrain"] / pair["torch"] for pair in pairs]
    print(
        f"hpctrain / torch: {statistics.median(ratios):.3f}, with {figures.told(ratios, 3)}; losses {apart:.0e} apart"
    )
    fault = f"losses are {apart:.1e} apart" if apart > TOLERANCES[flags.precision] else None
    return {"pairs": pairs, "difference": apart}, fault


def main(argv: list[str]) -> int:
    if (flags := figures.settle(NAME, parse, argv, None, ("torch",))) is None:
        return 2
    try:
        result, fault = run(flags)
    except figures.Refused as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    if flags.json:
        Path(flags.json).write_text(json.dumps({"flags": vars(flags), **result}, indent=1), encoding="utf-8")
    if fault:
        print(fault)
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
