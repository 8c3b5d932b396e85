"""What starts ranks and is none itself: the writer of job scripts, and the supervisor around mpirun. Loads no MPI."""
