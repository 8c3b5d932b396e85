"""hpctrain: distributed training of PyTorch models where MPI is the transport.

`python -m hpctrain` trains a task; the names below are for a training loop of your own:

    from hpctrain import DataParallel, Mesh, Sampler

`import hpctrain` loads neither MPI, torch nor NumPy: each name loads what it needs when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.comm.abort import abort_on_error
    from hpctrain.comm.allreduce import AllReduce
    from hpctrain.comm.mesh import Mesh
    from hpctrain.comm.roles import Roles
    from hpctrain.tasks.table import Table
    from hpctrain.train.api import DataParallel
    from hpctrain.train.own_loop import ParameterClient
    from hpctrain.train.pipeline import Pipeline
    from hpctrain.train.sampler import Sampler
    from hpctrain.train.server import ParameterServer

__version__ = "0.1.0"
__all__ = ["AllReduce", "DataParallel", "Mesh", "ParameterClient", "ParameterServer", "Pipeline", "Roles", "Sampler"]
__all__ += ["Table", "abort_on_error"]

_HOMES = {
    "AllReduce": "hpctrain.comm.allreduce",
    "DataParallel": "hpctrain.train.api",
    "Mesh": "hpctrain.comm.mesh",
    "ParameterClient": "hpctrain.train.own_loop",
    "ParameterServer": "hpctrain.train.server",
    "Pipeline": "hpctrain.train.pipeline",
    "Roles": "hpctrain.comm.roles",
    "Sampler": "hpctrain.train.sampler",
    "Table": "hpctrain.tasks.table",
    "abort_on_error": "hpctrain.comm.abort",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'hpctrain' has no attribute '{name}'; there are {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})
