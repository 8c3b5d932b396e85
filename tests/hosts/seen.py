"""What ranks see of their hosts, a line of JSON from rank 0: the name of each one's, and how many share its memory."""

import json
import os

from mpi4py import MPI

world = MPI.COMM_WORLD
seen = world.gather((os.uname().nodename, world.Split_type(MPI.COMM_TYPE_SHARED).size))
if world.rank == 0:
    print(json.dumps(seen))
