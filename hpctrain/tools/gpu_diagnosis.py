"""What the facts of gpus.gpu_facts mean, with what layers and a proof say about MPI: rows of a table, and findings.

Pure functions over plain data, as in diagnosis. Ranks that train come first, servers last.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.comm.cuda_aware import SWITCH, disagreement, verdict, word
from hpctrain.plan import devices
from hpctrain.tools.gpu_variables import harmful
from hpctrain.tools.proof import Proof

DIRECT = "direct: MPI takes device memory"
STAGED = "staged through pinned host memory"
HOST = "no device: host memory"


def gpu_table(ranks: list[dict], mpi: dict) -> list[tuple[str, str]]:
    """Rows as (name, value).

    `mpi["cuda_aware"]` holds by rank the answers of all layers, a line on what is wrong, or None where no MPI is.
    """
    first, answers, proof = ranks[0]["gpu"], mpi["cuda_aware"], mpi["proof"]
    layers = answers[0] if isinstance(answers[0], list) else []
    names = sorted({name for rank in ranks for name in rank["gpu"]["variables"]})
    return [
        ("CUDA of torch", _torch(first)),
        ("CuPy", ", ".join(first["cupy"]) or "not installed"),
        *((name, _by_rank([_value(rank["gpu"], name) for rank in ranks])) for name in names),
        *_device_rows(ranks),
        ("CUDA-aware MPI", _aware(answers)),
        *((f"  {layer}", f"{word(says)}: {why}") for layer, says, why in layers),
        *([] if proof is None else [("  proof", proof[1])]),
        ("path of gradients", path(ranks, answers)),
    ]


def gpu_findings(ranks: list[dict], mpi: dict, required: bool) -> Iterator[tuple[str, str, str]]:
    """What is wrong or unusual, as in diagnosis; `required`: devices have to be there."""
    yield from _aware_findings(mpi["cuda_aware"][: len(_workers(ranks))], mpi["proof"])
    yield from _device_findings(_workers(ranks), required)
    yield from harmful(_workers(ranks), mpi, required)


def _aware_findings(answers: list, proof: Proof | None) -> Iterator[tuple[str, str, str]]:
    wrong = next((each for each in answers if isinstance(each, str)), None)
    if wrong:
        yield "problem", wrong, f"{SWITCH}=0 is always right, if slower"
    known = [each for each in answers if isinstance(each, list)]
    if line := next(filter(None, map(disagreement, known)), None):
        yield "warning", line, f"{SWITCH}=0 or {SWITCH}=1, once it is known"
    if len({verdict(each)[0] for each in known}) > 1:
        yield "warning", "MPI is CUDA-aware on some ranks only", "the same MPI library and variables on every host"
    if known and proof and proof[0] not in (None, verdict(known[0])[0]):
        if proof[0]:
            yield (
                "warning",
                "MPI takes device memory, though layers do not say so",
                f"{SWITCH}=1, if it does between hosts",
            )
        else:
            yield "problem", f"layers say that MPI takes device memory, and {proof[1]}", f"{SWITCH}=0"


def _device_findings(workers: list[dict], required: bool) -> Iterator[tuple[str, str, str]]:
    hosts, chosen = [rank["host"] for rank in workers], _chosen(workers)
    for line in devices.shared(hosts, [rank["gpu"]["devices"] for rank in workers], chosen):
        yield "warning", line, "start as many ranks on each host as it has devices"
    lacking = _lacking(workers)
    if (line := devices.disagreement(hosts, chosen)) and not (required and lacking):
        yield "warning", line, "nvidia-smi on that host; CUDA_VISIBLE_DEVICES, or what the job was given"
    if required and lacking:
        yield "problem", f"--require cuda: {lacking}", "see the rows on CUDA above"


def path(ranks: list[dict], answers: list) -> str:
    """Which way gradients would travel between ranks that train: the slowest that one needs is that of all."""
    workers = _workers(ranks)
    if not any(rank["gpu"]["devices"] for rank in workers):
        return HOST
    aware = [isinstance(each, list) and verdict(each)[0] for each in answers[: len(workers)]]
    return DIRECT if all(aware) else STAGED


def _lacking(workers: list[dict]) -> str | None:
    """Why not every rank that trains can use a device; None: all can."""
    for number, rank in enumerate(workers):
        gpu, who = rank["gpu"], f"rank {number} on {rank['host']}"
        if not gpu["devices"]:
            return f"{who}: {gpu['no_device']}"
        if gpu["torch_cuda"] is None:
            return f"{who}: torch is built without CUDA"
        if gpu["torch_devices"] != len(gpu["devices"]):
            return f"{who}: the driver shows {len(gpu['devices'])} devices, torch {gpu['torch_devices']}"
    return None


def _workers(ranks: list[dict]) -> list[dict]:
    return [rank for rank in ranks if not rank["is_server"]]


def _chosen(ranks: list[dict]) -> list[int | None]:
    workers = _workers(ranks)
    return devices.choose_all([rank["node"] for rank in workers], [rank["gpu"]["devices"] for rank in workers])


def _device_rows(ranks: list[dict]) -> Iterator[tuple[str, str]]:
    """The device that each rank would take, by host; one row where there are none for the same reason."""
    chosen = [*_chosen(ranks), *[None] * len(ranks)]
    told = {rank: _device(facts["gpu"], chosen[rank]) for rank, facts in enumerate(ranks)}
    hosts = list(dict.fromkeys(facts["host"] for facts in ranks))
    if len(set(told.values())) == 1 and chosen[0] is None:
        yield "CUDA devices", told[0]
        return
    yield "CUDA devices", f"{len({name for facts in ranks for name in facts['gpu']['devices']})} seen"
    for host in hosts:
        here = {rank: text for rank, text in told.items() if ranks[rank]["host"] == host}
        yield f"  {host}", _grouped(here)


def _device(gpu: dict, device: int | None) -> str:
    return f"none, {gpu['no_device']}" if device is None else f"number {device} of {len(gpu['devices'])}"


def _value(gpu: dict, variable: str) -> str:
    return gpu["variables"].get(variable, "not set") or "empty"


def _torch(gpu: dict) -> str:
    if gpu["torch_cuda"] is None:
        return "none: built without"
    if not gpu["devices"]:
        return gpu["torch_cuda"]
    seen = gpu["torch_devices"]
    return f"{gpu['torch_cuda']}, " + (f"sees {seen}" if isinstance(seen, int) else f"cannot be loaded: {seen}")


def _aware(answers: list) -> str:
    known = [each for each in answers if isinstance(each, list)]
    if len(known) < len(answers):
        return "not asked"
    said = [f"{word(says)} ({why})" for says, why in map(verdict, known)]
    return _by_rank(said)


def _by_rank(values: list[str]) -> str:
    """A value of every rank, once where all have the same."""
    return values[0] if len(set(values)) == 1 else _grouped(dict(enumerate(values)))


def _grouped(values: dict[int, str]) -> str:
    """`rank 0: a; ranks 1, 2: b`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {value}" for value, who in ranks.items())
