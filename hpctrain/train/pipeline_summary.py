"""What the summary says of a pipeline: by formula, by simulation and as it was."""

from hpctrain.comm.mesh import Mesh
from hpctrain.train.executor import Executor
from hpctrain.train.timing import bubble_figures


def pipeline_figures(executor: Executor, offset: float, num_updates: int, mesh: Mesh) -> dict:
    """Bubble, and by stage: layers, micro-batches in flight, weight versions, bytes of activations. Collective.

    `offset` as for bubble_figures; `num_updates` are those of the longest run without a flush.
    """
    stage, passes, tied = executor.stage, executor.passes, executor.update.tied
    parts = [[part.start, part.stop - 1] for part in stage.parts]
    sizes = {name: parameter.numel() for name, parameter in stage.named_parameters().items()}
    own = {
        "layers": parts,
        "parameters": sum(sizes[name] for name in tied.own(sizes)),
        "unsplit": passes.split.unsplit if passes.split else [],
        "peaks": [passes.peak_in_flight, executor.update.num_versions, None if passes.split else passes.meter.peak],
    }
    told = mesh.everybody.all_gather_json(own)
    stages = [[told[rank] for rank in mesh.grid.replicas_of(number)] for number in range(mesh.grid.num_stages)]
    in_flight, versions, activations = zip(*(map(_most, *(each["peaks"] for each in stage)) for stage in stages))
    return {
        "stages": [{key: stage[0][key] for key in ("layers", "parameters", "unsplit")} for stage in stages],
        "bubble_rate": bubble_figures(executor.timing, executor.name, executor.place, offset, num_updates, mesh),
        "peak_in_flight": list(in_flight),
        "weight_versions": list(versions),
        "peak_activation_bytes": list(activations),
    }


def _most(*of_replicas: int | None) -> int | None:
    return None if None in of_replicas else max(of_replicas)
