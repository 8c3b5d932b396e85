"""What an all-reduce sends over the network: `python sent.py ALGORITHM BYTES`, on ranks of several hosts.

Rank 0 prints JSON: how many elements were wrong, and how much each host sent. That is what the counters of its
interface say, less the headers: a card that cuts TCP into packets by itself shows the kernel large ones, so a figure
with headers depends on the card.
"""

import json
import os
import sys

import numpy as np

from hpctrain import AllReduce, Mesh

HEADERS = 14 + 20 + 20 + 12  # bytes of a packet: Ethernet, IP, TCP and its time stamps
INTERFACE = "eth0:"


def payload_sent() -> int:
    """Bytes of TCP payload that left this host so far."""
    with open("/proc/net/dev", encoding="ascii") as file:
        (counters,) = (line.split()[1:] for line in file if line.split()[0] == INTERFACE)
    received, sent = counters[:8], counters[8:]
    assert received[2] == sent[2] == "0", counters  # errors
    return int(sent[0]) - HEADERS * int(sent[1])


def counted(mesh: Mesh) -> int:
    """As payload_sent, while no rank sends anything. Collective."""
    mesh.barrier()
    sent = payload_sent()
    mesh.barrier()
    return sent


def main(algorithm: str, nbytes: int) -> None:
    with Mesh() as mesh:
        reduce, pattern = AllReduce(mesh, algorithm=algorithm), np.arange(nbytes // 4, dtype="float32") % 251
        array = reduce.empty(len(pattern))
        array[:] = 0
        reduce(array)  # connections are made by the first messages
        array[:] = pattern * (mesh.rank + 1)
        before = counted(mesh)
        reduce(array)
        sent = counted(mesh) - before
        wrong = int((array != pattern * (mesh.size * (mesh.size + 1) // 2)).sum())
        told = mesh.world.all_gather_json((os.uname().nodename, sent, wrong))
    if mesh.rank == 0:
        print(json.dumps({"wrong": sum(each for _, _, each in told), "sent": {host: sent for host, sent, _ in told}}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
