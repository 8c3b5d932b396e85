"""What the summary says of a parameter service: how far workers ran apart, how long they waited, what servers did."""

import math
from collections import Counter

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.train.executor import Executor


def service_figures(config: Config, executor: Executor, seconds: float, servers: list[dict], mesh: Mesh) -> dict:
    """`servers` as they told of themselves, none where there are none. Collective.

    A gap is the clock of a pull less that of the slowest worker, when it was served; a lag the updates that overtook
    one between its pull and itself; each server counts its own, and evaluations are left out.
    """
    if not servers:
        return {"staleness": None, "servers": None}
    waited = executor.update.client.seconds_waited / seconds if seconds else 0.0
    figures = [each["server"] for each in servers]
    gaps, lags = (_sum_of(each[key] for each in figures) for key in ("clock_gaps", "lags"))
    return {
        "staleness": {
            "bound": "inf" if math.isinf(config.staleness) else int(config.staleness),
            "max_clock_gap": max(map(int, gaps), default=0),
            "histogram": gaps,
            "lags": lags,
            "waiting_share": mesh.world.all_gather_json(waited),
        },
        "servers": [
            {key: value for key, value in each.items() if key not in ("clock_gaps", "lags")} for each in figures
        ],
    }


def _sum_of(histograms) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in histograms:
        total.update(each)
    return dict(sorted(total.items(), key=lambda pair: int(pair[0])))
