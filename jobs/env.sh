# Edit this file for your cluster; every job script here reads it, and srun hands it on to the ranks.

# 1. Python and MPI: what `make venv` installed. With `make venv MPI=system` load the site's MPI first.
# module load openmpi
source .venv/bin/activate

# 2. How srun reaches that MPI: pmi2 for MPICH and its relatives (the default of `make venv`), pmix for Open MPI.
# `srun --mpi=list` shows what there is, `python -m hpctrain doctor` which MPI this is.
SRUN_MPI=pmi2

# 3. Nodes with more than one network (also docker0 or virbr0): name the right one, if the first message hangs.
# export FI_TCP_IFACE=eth0 UCX_NET_DEVICES=eth0                 # MPICH
# export OMPI_MCA_btl_tcp_if_include=eth0                       # Open MPI over TCP
