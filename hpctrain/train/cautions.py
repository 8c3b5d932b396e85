"""Lines for who asks for what does not do what one may expect."""

import sys

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.plan.compression import parse_compression
from hpctrain.train.executor import Executor


def note_mixing(executor: Executor, mesh: Mesh) -> None:
    """One line for who uses layers that see their micro-batch only. Collective."""
    told = mesh.everybody.all_gather_json(executor.update.statistics.mixing if mesh.replica == 0 else [])
    names, sampler = [name for part in told for name in part], executor.batches.sampler
    if not names or mesh.rank:
        return
    num_pieces = executor.batches.num_microbatches * mesh.data.size
    last = sampler.num_rows % sampler.batch_size or sampler.batch_size
    fewest = max(1, min(last, sampler.batch_size) // num_pieces)
    print(
        f"note: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} mixes the rows of a micro-batch,"
        f" here {fewest} at least: training equals one process with --num-microbatches {num_pieces}, running statistics"
        " are averaged over the replicas; GroupNorm and LayerNorm do not depend on the layout",
        file=sys.stderr,
    )


def note_compression(config: Config, executor: Executor, mesh: Mesh) -> None:
    """One line where no message carries sums, or where none would carry whole ones. Collective."""
    if config.compress == "none" or mesh.data.size == 1:
        return
    reduction, ring = executor.update.reduction, mesh.data.ring
    keeps_rest = parse_compression(config.compress).keeps_rest
    sends_plain = config.allreduce != "auto" or ring.spans_nodes or ring.node is None
    own = [sends_plain if keeps_rest else each.wire != "none" for each in reduction.collectives]
    told = [each for part in mesh.everybody.all_gather_json(own) for each in part]
    if not told or any(told) or mesh.rank:
        return
    if keeps_rest:
        why = "sends more than none: the ranks share a node, where whole gradients are summed in its memory"
    else:
        why = (
            "has no effect: the ranks share a node, where gradients are summed as they are; --allreduce ring compresses"
            " them there too"
        )
    print(f"note: --compress {config.compress} {why}", file=sys.stderr)
