"""Several commands in one launch, where each in one of its own would mostly wait for torch.

`mpirun -n N python several.py FOLDER`: each rank gives hpctrain's own main one command line after another, as
FOLDER/commands.json has them. What all ranks print during one of them goes into a file of its own, and so does the
exit code that they agree on. Not for what ends ranks otherwise than by such a code.
"""

import json
import sys
from pathlib import Path

from tests.harness.launch import Result, run_mpi


def several(n: int, folder: Path, commands: dict, **how) -> dict[str, Result]:
    """What each of `commands`, by name, gave on n ranks; `folder` is a new one. `how` as for run_mpi."""
    folder.mkdir()
    (folder / "commands.json").write_text(json.dumps([[str(word) for word in argv] for argv in commands.values()]))
    result = run_mpi(n, [sys.executable, __file__, folder], **{"timeout": 120, **how})
    assert result.returncode == 0, "\n".join((str(result), *(file.read_text() for file in folder.glob("*.err"))))
    return {name: _result(folder, number, result.seconds) for number, name in enumerate(commands)}


def _result(folder: Path, number: int, seconds: float) -> Result:
    code, out, err = ((folder / f"{number}.{end}").read_text() for end in ("code", "out", "err"))
    return Result(int(code), out, err, seconds)


def main(folder: Path) -> None:
    from hpctrain import cli
    from hpctrain.comm.start import join_launch

    commands = json.loads((folder / "commands.json").read_text())
    for argv in commands:
        cli.before_mpi(argv)
    comm = join_launch()
    streams = sys.stdout, sys.stderr
    for number, argv in enumerate(commands):
        with (folder / f"{number}.out").open("a") as sys.stdout, (folder / f"{number}.err").open("a") as sys.stderr:
            code = cli.main(argv, comm)
            sys.stderr.flush()  # by now it may be hpctrain's own
        sys.stdout, sys.stderr = streams
        codes = comm.gather(code)
        if comm.rank == 0:
            assert len(set(codes)) == 1, codes
            (folder / f"{number}.code").write_text(str(code))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
