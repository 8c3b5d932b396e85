"""What a schedule costs, as the papers have it; the simulation and the measured run are held against these.

p stages, m micro-batches an update, v chunks of layers a stage, r a stage (from 0). The bubble *rate* is idle / total
time, as GPipe and Zero Bubble count it; Megatron's *overhead* is idle / ideal.
"""

from hpctrain.plan.schedule import SCHEDULES, Place


def bubble_rate(name: str, place: Place, forward=1.0, backward=2.0, weights=1.0) -> float:
    """Of stages that all take the same time. Without a flush it goes to 0 as updates follow each other."""
    p, m, v = place.num_stages, place.num_microbatches, place.num_chunks
    if not SCHEDULES[name].flushes:
        return 0.0
    if name == "naive":
        return (p - 1) / p
    if name == "zb-h1":
        idle = (p - 1) * max(0.0, forward + backward - 2 * weights)
        return idle / (idle + m * (forward + backward))
    return (p - 1) / (v * m + p - 1)


def peak_in_flight(name: str, place: Place) -> int | None:
    """Micro-batches of which stage r holds activations at once, until B; None where only the simulation knows."""
    p, m, r = place.num_stages, place.num_microbatches, place.stage
    if name == "naive":
        return 1
    if name == "f-then-b":
        return m
    if name == "1f1b-interleaved":
        return None
    total = m * place.num_updates
    return min(total, round(place.warmup * (p - 1 - r)) + 1)


def weight_versions(name: str, place: Place, vertical_sync: bool = False) -> int:
    """Versions of the weights that stage r holds at once."""
    if name == "1f1b-async":
        return place.num_stages if vertical_sync else place.num_stages - place.stage
    return 2 if name == "2bw" else 1


def version_used(name: str, place: Place, microbatch: int, vertical_sync: bool = False) -> int:
    """Which version stage r computes a micro-batch with: the number of updates made before, both passes alike.

    1f1b-async: the newest that stage r has when the forward comes; with vertical sync the newest of stage 0.
    2bw: that of the update before the last (Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021).
    """
    if name == "1f1b-async":
        behind = place.num_stages - 1 if vertical_sync else place.num_stages - 1 - place.stage
        return max(0, microbatch - behind)
    update = microbatch // place.num_microbatches
    return max(0, update - 1) if name == "2bw" else update


def delay(name: str, place: Place, vertical_sync: bool = False) -> int:
    """Updates between the weights that a gradient was computed with and those that it changes, in the steady state."""
    if name == "1f1b-async":
        return place.num_stages - 1 if vertical_sync else place.num_stages - 1 - place.stage
    return 1 if name == "2bw" else 0
