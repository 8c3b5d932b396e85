"""Workers and a server until one of them dies: `mpirun -n 3 python served.py FAULT RANK ROUND`.

FAULT is kill, raise, leave (without done), differ (in a setting, from the beginning) or babble, which MPI cannot bring
to the server; it happens on RANK (the last is the server) in about that round.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from hpctrain import ParameterClient, ParameterServer, Roles
from hpctrain.comm import messages

FAULT, RANK, ROUND = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def happen(roles: Roles) -> None:
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "leave":
        sys.exit(0)
    if FAULT == "babble":
        roles.everybody.comm.Send(np.zeros(200, np.uint8), roles.rank_of_server(0), messages.TO_SERVER)
        time.sleep(60)
    raise ValueError("boom")


def serve(roles: Roles) -> None:
    server = ParameterServer(roles)
    finish = server.shard.finish

    def counted(worker, clock, *rest):
        finish(worker, clock, *rest)
        if roles.rank == RANK and clock >= ROUND:
            happen(roles)

    server.shard.finish = counted
    server.serve()


def work(roles: Roles) -> None:
    model = torch.nn.Linear(300, 300)
    rate = 0.5 if FAULT == "differ" and roles.rank == RANK else 1e-6
    if FAULT == "differ":
        Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    client = ParameterClient(roles, model, {"rows": (100, 4, 0.1)}, lr=rate, staleness=1)
    for number in range(10**6):
        client.pull()
        ids = torch.arange(number % 90, number % 90 + 7)
        (model(torch.ones(1, 300)).sum() + client.rows("rows", ids).sum()).backward()
        if roles.rank == RANK and number >= ROUND:
            happen(roles)
        client.push(items=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    roles = Roles()
    if roles.is_server:
        serve(roles)
    else:
        work(roles)
