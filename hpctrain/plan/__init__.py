"""What is to happen, as data: pure, deterministic, standard library only. Nothing here knows MPI, torch or NumPy."""
