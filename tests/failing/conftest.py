"""What can only be seen with one of the MPIs is not collected with another one."""

from tests.harness.launch import mpirun, vendor

collect_ignore = [] if vendor(mpirun()[0]) == "Open MPI" else ["test_losses.py"]  # no other goes on without a rank
