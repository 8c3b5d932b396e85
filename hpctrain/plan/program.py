"""From the order of a stage's computations to everything that it does: messages, sums and updates put in.

A forward is preceded by the receipt of its inputs and followed by the sending of its outputs, a backward likewise the
other way round; the first layers of the model receive nothing, the last ones send nothing. So no executor asks where it
is: what is not in its list it does not do.
"""

from collections.abc import Iterator

from hpctrain.plan.schedule import SCHEDULES, Action, Op, Place, Schedule

NOTHING, TABLES, ALL = "nothing", "tables", "all"  # what of a model servers hold


def program(name: str, place: Place, tied: bool = False, clips: bool = False, served: str = NOTHING) -> list[Action]:
    """All actions of a stage until the pipeline is empty again. ValueError where the schedule does not fit `place`.

    `tied`: the stage shares weights with others; `clips`: an update needs the norm over all stages; `served`: whether
    servers hold its tables, or all of it, instead of the replicas.
    """
    return list(actions(name, place, tied, clips, served))


def actions(
    name: str, place: Place, tied: bool = False, clips: bool = False, served: str = NOTHING
) -> Iterator[Action]:
    """The actions of `program`, one after another: without a flush there may be millions."""
    check(name, place)
    if served == NOTHING:
        return _with_updates(name, place, tied, clips)
    return _with_servers(SCHEDULES[name], place, served)


def _with_servers(schedule: Schedule, place: Place, served: str) -> Iterator[Action]:
    """A worker's: what it computes with is pulled before, what it computed is pushed after."""
    yield Action(Op.PULL)
    yield from schedule.generate(place)
    yield Action(Op.PUSH)
    if served == TABLES:
        yield from (Action(op) for op in (Op.REDUCE, Op.AGREE, Op.STEP))


def forwards(place: Place, num_batches: int) -> Iterator[Action]:
    """What an evaluation does on a stage: forwards alone, num_stages batches through a chunk before the next chunk."""
    for start in range(0, num_batches, place.num_stages):
        for chunk in range(place.num_chunks):
            for number in range(start, min(num_batches, start + place.num_stages)):
                yield from _with_messages(Action(Op.F, number, chunk), place)


def updates_after(name: str, place: Place) -> int:
    """Micro-batches of a replica that make an update."""
    return 1 if SCHEDULES[name].microbatch_updates else place.num_microbatches


def check(name: str, place: Place) -> None:
    """ValueError, one line that names the flag, for numbers that the schedule cannot have."""
    schedule, stages, pieces = SCHEDULES[name], place.num_stages, place.num_microbatches
    if schedule.has_chunks and place.num_chunks < 2:
        raise ValueError(f"--schedule {name}: needs --chunks 2 or more, with 1 it is 1f1b")
    if schedule.has_chunks and stages < 2:
        raise ValueError(f"--schedule {name}: needs --stages 2 or more, there is nothing to interleave with 1")
    if not schedule.has_chunks and place.num_chunks != 1:
        raise ValueError(f"--chunks {place.num_chunks}: --schedule {name} has one chunk of layers a stage")
    if schedule.has_chunks and pieces % stages:
        fits = f"{pieces - pieces % stages} or {pieces + -pieces % stages}" if pieces > stages else f"{stages}"
        raise ValueError(f"--num-microbatches {pieces}: --schedule {name} takes multiples of --stages, such as {fits}")
    if name == "2bw" and pieces < stages:
        raise ValueError(f"--num-microbatches {pieces}: --schedule 2bw takes {stages} or more, one a stage")
    assert schedule.flushes <= (place.num_updates == 1), (name, place)


def _with_updates(name: str, place: Place, tied: bool, clips: bool) -> Iterator[Action]:
    schedule, each = SCHEDULES[name], updates_after(name, place)
    agrees = clips and not schedule.microbatch_updates
    last = Op.W if schedule.splits_backward else Op.B
    for action in schedule.generate(place):
        yield from _with_messages(action, place)
        done = action.microbatch + 1
        if not schedule.flushes and action.op is last and done % each == 0:
            ops = (Op.REDUCE, Op.AGREE, Op.STEP) if agrees else (Op.REDUCE, Op.STEP)
            yield from (Action(op, done // each - 1) for op in ops)
    if schedule.flushes:
        yield from (Action(op) for op in (Op.REDUCE, *((Op.TIE,) if tied else ()), Op.AGREE, Op.STEP))


def _with_messages(action: Action, place: Place) -> Iterator[Action]:
    op, microbatch, chunk = action
    part = chunk * place.num_stages + place.stage
    first, last = part == 0, part == place.num_chunks * place.num_stages - 1
    if op is Op.W or (first and last):
        yield action
        return
    receives, sends = (not first, not last) if op is Op.F else (not last, not first)
    if receives:
        yield Action(Op.RECV_F if op is Op.F else Op.RECV_B, microbatch, chunk)
    yield action
    if sends:
        yield Action(Op.SEND_F if op is Op.F else Op.SEND_B, microbatch, chunk)
