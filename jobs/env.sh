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

# 4. GPUs: an MPI that takes device memory, where there is one; with any other hpctrain goes through the host by itself.
# Take away the # of one, then `srun python -m hpctrain doctor --require cuda`; docs/gpu.md has more, and what does harm.
# export OMPI_MCA_pml=ucx                                       # Open MPI, built --with-cuda and --with-ucx
# export UCX_TLS=rc,sm,cuda                                     # UCX: who names transports has to name cuda
# export OMPI_MCA_opal_cuda_support=true                        # Open MPI of conda-forge
# module load craype-accel-nvidia80                             # Cray MPICH; before mpi4py is built, too
# export MPICH_GPU_SUPPORT_ENABLED=1                            # Cray MPICH, with libmpi_gtl_cuda linked or preloaded
# export MV2_USE_CUDA=1 MV2_SUPPORT_DL=1                        # MVAPICH2-GDR, with LD_PRELOAD="$MV2_HOME/lib/libmpi.so"
# export MVP_USE_CUDA=1                                         # MVAPICH 3 and later
# export I_MPI_OFFLOAD=1 I_MPI_OFFLOAD_MODE=cuda                # Intel MPI
