"""Facts of ranks with and without devices, as the doctor gathers them."""

NO_GPU = {
    "devices": [],
    "no_device": "no CUDA driver (libcuda.so.1)",
    "torch_cuda": None,
    "torch_devices": 0,
    "cupy": [],
    "variables": {},
}
TWO_GPUS = {
    "devices": ["GPU-a", "GPU-b"],
    "no_device": None,
    "torch_cuda": "13.0",
    "torch_devices": 2,
    "cupy": ["cupy-cuda13x 14.0.1"],
    "variables": {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
}
NOT_AWARE = [
    ["switch", None, "HPCTRAIN_CUDA_AWARE is not set"],
    ["info", None, "no mpi_memory_alloc_kinds"],
    ["library", False, "its function gives 0"],
    ["variables", None, "none"],
]
AWARE = [NOT_AWARE[0], ["info", True, "mpi_memory_alloc_kinds is mpi,system,cuda"], *NOT_AWARE[3:]]
