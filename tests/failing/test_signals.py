"""What mpirun does with a signal, and what becomes of the run: docs/signals.md says what is seen here."""

import json
import os
import signal
import sys

import pytest

from hpctrain.train import checkpoint_files as files
from hpctrain.train.signals import REQUEUE
from tests.harness.launch import ROOT, mpirun, run_mpi, vendor
from tests.soak.job import Job, kill, num_lines

OPENMPI = vendor(mpirun()[0]) == "Open MPI"
