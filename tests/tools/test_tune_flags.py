"""What tune is asked for: flags and what stands in a --config file; one line for what cannot be measured."""

import pytest

from hpctrain.tools import tune
from tests.harness.launch import ROOT

TOYS = f"{ROOT}/tests/train/toys.py"


@pytest.mark.parametrize(
    "argv, sizes",
    [
        ("", [4096, 16384, 65536, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]),
        ("--min-bytes 8 --max-bytes 511", [8, 32, 128]),
        ("--max-bytes 4096", [4096]),
    ],
)
def test_sizes_go_by_fours_up_to_the_largest(argv, sizes):
    assert tune.sizes_of(tune.parser().parse_args(argv.split())) == sizes


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--max-bytes", "8"], "tune: name the file to write, as in: tune --out tuning.json"),
        (["--out", "HERE/there.json"], "HERE/there.json: exists already; name a new file"),
        (["--out", "HERE/link.json"], "HERE/link.json: exists already; name a new file"),
        (["--out", "HERE/no/x.json"], "HERE/no/x.json: no such folder"),
        (["--out"], "--out: expected one argument"),
        (["--out", "-", "--min-bytes", "6"], "--min-bytes 6: expected a multiple of 4, the bytes of a float32"),
        (["--out", "-", "--min-bytes", "0"], "--min-bytes: expected a whole number >= 4, got '0'"),
        (["--out", "-", "--max-bytes", "64"], "--max-bytes 64: should be at least --min-bytes 4096"),
        (
            ["--out", "-", "--max-bytes", "2147483648"],
            "--max-bytes 2147483648: at most 1073741824, the largest message",
        ),
        (["--out", "-", "--max-bytes", "1e6"], "--max-bytes: expected a whole number >= 4, got '1e6'"),
        (["--out", "-", "--repeats", "0"], "--repeats: expected a whole number >= 1, got '0'"),
        (["--out", "-", "--repeats", "9" * 5000], f"--repeats: expected a whole number >= 1, got '{'9' * 5000}'"),
        (["--out", "-", "--stages", "2"], "--stages: tune has no such flag; with --task NAME it takes those of train"),
        (["--out", "-", "extra"], "extra: tune has no such flag; with --task NAME it takes those of train"),
        (["--out", "-", "--task", "text", "--stagse", "2"], "--stagse: no such flag; did you mean --stages?"),
        (["--out", "-", "--task", "nothing"], "--task nothing: there is no such task"),
        (["--out", "-", "--task", "text", "--bucket-bytes", "9"], "--bucket-bytes: is what is measured here; leave it"),
        (["--out", "-", "--task", "text", "--tuning", "x"], "--tuning: is what is measured here; leave it out"),
        (["--out", "-", "--task", "text", "--servers", "1"], "--servers: gradients go to the servers; leave it out"),
        (["--out", "-", "--task", "text", "--stages", "4"], "--stages 4: on 4 ranks nothing is summed up; leave two"),
        (["--out", "-", "--task", "text", "--stages", "3"], "--stages 3: "),
        (["--out", "-", "--task", "text", "--data", "HERE/there.json"], "--data HERE/there.json: "),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(tmp_path, argv, line):
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "link.json").symlink_to("nowhere")
    usage = tune._asked([word.replace("HERE", str(tmp_path)) for word in argv], 4)["usage"]
    assert usage.startswith(line.replace("HERE", str(tmp_path))) and "\n" not in usage
    assert (tmp_path / "there.json").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


def test_servers_of_a_config_file_are_refused_and_may_be_taken_back(tmp_path):
    (tmp_path / "c.toml").write_text("servers = 1\n")
    argv = ["--out", "-", "--task", f"{TOYS}:Masked", "--config", str(tmp_path / "c.toml")]
    assert tune._asked(argv, 4) == {"usage": "--servers: gradients go to the servers; leave it out"}
    assert tune._asked([*argv, "--servers", "0"], 4)["config"]["servers"] == 0


@pytest.mark.parametrize("tuning", ['"old.json"', "{latency = 1, seconds_per_byte = 1e-9, LARGEST}"])
def test_the_config_file_of_a_tuned_run_is_taken_without_what_is_measured(tmp_path, tuning):
    text = tuning.replace("LARGEST", "largest_doubled = 0, largest_staged = 0")
    (tmp_path / "c.toml").write_text(f"bucket_bytes = 77\nlr = 0.5\ntuning = {text}\n")
    argv = ["--out", "-", "--task", f"{TOYS}:Masked", "--config", str(tmp_path / "c.toml")]
    config = tune._asked(argv, 4)["config"]
    assert (config["tuning"], config["bucket_bytes"], config["lr"]) == (None, 1 << 20, 0.5)
    usage = "--bucket-bytes: is what is measured here; leave it out"
    assert tune._asked([*argv, "--bucket-bytes", "64"], 4) == {"usage": usage}


@pytest.mark.parametrize("argv", [[], ["--out", "x.json"], ["--out", "x.json", "--task", "text"]])
def test_one_process_has_nothing_to_measure(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tune.run(argv, None) == 2
    assert capsys.readouterr().err == (
        "hpctrain: tune: one rank sums nothing up; start two at least: mpirun -n 2 python -m hpctrain tune --out FILE\n"
    )
    assert not list(tmp_path.iterdir())
