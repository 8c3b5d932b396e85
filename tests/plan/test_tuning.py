"""Files of `tune`: read back as they were written; refused in one line, with the key, where anything is wrong."""

import dataclasses
import json
import random

import pytest

from hpctrain.plan.allreduce import BUILT_IN, Constants, by_messages, choose
from hpctrain.plan.tuning import CONSTANTS, Place, Tuning, constants_of, parse, within

WHOLE = {
    "format": 1,
    "hpctrain": "0.1.0",
    "date": "2026-01-31T12:00:00+00:00",
    "ranks": 4,
    "nodes": 2,
    "ranks_per_node": 2,
    "mpi": "MPICH 5.0.2",
    "latency": 2.5e-5,
    "seconds_per_byte": 1.25e-10,
    "largest_doubled": 65536,
    "largest_staged": 1048576,
    "bucket_bytes": 4194304,
    "task": "text",
    "times": [{"bytes": 4096, "ring": 1e-4}],
    "steps": [{"bucket_bytes": 4194304, "seconds": 0.1}],
}
EXTREMES = [
    Constants(*(rule.kind(end) for rule, end in zip(CONSTANTS.values(), ends)))
    for ends in (
        [rule.low for rule in CONSTANTS.values()],
        [rule.high for rule in CONSTANTS.values()],
        [60, 1e-15, 1 << 30, 0],
        [1e-9, 1e-3, 0, 1 << 50],
    )
]


def test_a_whole_file_is_read_to_the_last_bit():
    found = parse(json.dumps(WHOLE))
    assert found == Tuning(Constants(2.5e-5, 1.25e-10, 65536, 1048576), 4194304, Place(4, 2, 2, "MPICH 5.0.2"))
    assert Tuning.of(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    assert Tuning.of(dataclasses.asdict(Tuning())) == Tuning()


@pytest.mark.parametrize("without", [("bucket_bytes",), ("task", "steps"), ("bucket_bytes", "task", "steps")])
def test_without_a_task_there_is_no_bucket_size(without):
    found = parse(json.dumps({key: value for key, value in WHOLE.items() if key not in without}))
    assert found.bucket_bytes == (None if "bucket_bytes" in without else 4194304)


def test_nodes_may_hold_unequally_many_ranks():
    assert parse(json.dumps({**WHOLE, "ranks": 5, "ranks_per_node": None})).place.ranks_per_node is None


def test_places_that_differ_are_told_in_different_words():
    places = (4, 1, 4), (4, 2, 2), (4, 2, None), (4, 4, 1), (1, 1, 1)
    assert [str(Place(*each, "M")) for each in places] == [
        "4 ranks on 1 node with M",
        "4 ranks on 2 nodes, 2 on each, with M",
        "4 ranks on 2 nodes, unequally many on each, with M",
        "4 ranks on 4 nodes, 1 on each, with M",
        "1 rank on 1 node with M",
    ]


@pytest.mark.parametrize(
    "change, what",
    [
        ({"latency": -1e-6}, "latency is -1e-06; expected seconds from 1e-09 to 60; measure again: mpirun -n N"),
        ({"latency": 0}, "latency is 0; expected seconds from"),
        ({"latency": 1e9}, "latency is 1000000000.0; expected seconds"),
        ({"latency": float("nan")}, "latency is nan; expected"),
        ({"latency": float("inf")}, "latency is inf; expected"),
        ({"latency": "1e-6"}, "latency is '1e-6'; expected"),
        ({"latency": True}, "latency is True; expected"),
        ({"latency": None}, "latency is None; expected"),
        ({"latency": [1e-6]}, "latency is [1e-06]; expected"),
        ({"seconds_per_byte": -1e-9}, "seconds_per_byte is -1e-09; expected"),
        ({"seconds_per_byte": 1.0}, "seconds_per_byte is 1.0; expected"),
        ({"seconds_per_byte": float("-inf")}, "seconds_per_byte is -inf"),
        ({"largest_doubled": -1}, "largest_doubled is -1; expected a whole number of bytes from 0 to"),
        ({"largest_doubled": 1.5}, "largest_doubled is 1.5; expected a whole number of bytes"),
        ({"largest_doubled": (1 << 30) + 1}, "largest_doubled is 1073741825; expected a whole number"),
        ({"largest_doubled": False}, "largest_doubled is False"),
        ({"largest_staged": 10**60}, "largest_staged is 1000000000000000000000000000000000000...; expected"),
        ({"largest_staged": {}}, "largest_staged is {}"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0; expected a whole number of bytes from 1"),
        ({"bucket_bytes": None}, "bucket_bytes is None"),
        ({"bucket_bytes": 1e6}, "bucket_bytes is 1000000.0"),
        ({"format": 2}, "format 2 is newer than this hpctrain, which reads 1; measure again"),
        ({"format": 0}, "format is 0; expected 1"),
        ({"format": "1"}, "format is '1'; expected 1"),
        ({"format": True}, "format is True; expected 1"),
        ({"ranks": 1, "nodes": 1, "ranks_per_node": 1}, "ranks is 1; expected 2 at least"),
        ({"ranks": -4}, "ranks is -4; expected"),
        ({"ranks": "4"}, "ranks is '4'; expected"),
        ({"nodes": 0}, "nodes is 0; expected"),
        ({"nodes": 5, "ranks_per_node": None}, "nodes is 5; expected at most the 4 ranks"),
        ({"ranks_per_node": 3}, "ranks_per_node is 3; 4 ranks on 2 nodes do not fit that"),
        ({"ranks_per_node": 2.0}, "ranks_per_node is 2.0"),
        ({"mpi": 5}, "mpi is 5; expected the name of a library"),
        ({"mpi": "two\nlines"}, "mpi is 'two\\nlines'; expected"),
        ({"mpi": "\ud800"}, "mpi is '\\ud800'; expected"),
        ({"hpctrain": 1}, "hpctrain is 1; expected text"),
        ({"times": "none"}, "times is 'none'; expected a list"),
        ({"steps": {}}, "steps is {}; expected a list"),
        ({"lateny": 1e-6}, "'lateny': no such key; there is format, ranks"),
        ({"two\nlines": 1}, "'two\\nlines': no such key"),
    ],
)
def test_a_wrong_value_is_told_by_its_key(change, what):
    with pytest.raises(ValueError) as caught:
        parse(json.dumps({**WHOLE, **change}))
    assert str(caught.value).startswith(what) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", [key for key in WHOLE if key not in ("bucket_bytes", "task", "steps")], ids=lambda key: f"no {key}"
)  # the id `mpi` alone would be taken for the mark
def test_a_key_that_lacks_is_told(key):
    with pytest.raises(ValueError, match=f"^{key}: missing"):
        parse(json.dumps({other: value for other, value in WHOLE.items() if other != key}))


@pytest.mark.parametrize(
    "text, what",
    [
        ("", "not a whole file of JSON; measure again"),
        ("{", "not a whole file of JSON"),
        (json.dumps(WHOLE)[:-1], "not a whole file of JSON"),
        (json.dumps(WHOLE) + "x", "not a whole file of JSON"),
        ("[" * 100_000, "not a whole file of JSON"),
        ('{"format": ' + "1" * 5000 + "}", "not a whole file of JSON|format 1111"),
        ("[]", "format: missing, so `tune` did not write this"),
        ("1", "format: missing"),
        ("null", "format: missing"),
        ('{"layers": []}', "format: missing"),
        ('{"format": 1, "format": 1}', "'format': stands there twice"),
        (json.dumps(WHOLE).replace('"nodes"', '"ranks"'), "'ranks': stands there twice"),
        ("\0\1\2", "not a whole file of JSON"),
    ],
)
def test_a_file_that_is_none_of_ours_is_told(text, what):
    with pytest.raises(ValueError, match=f"^({what})"):
        parse(text)


def test_no_damage_of_a_byte_or_two_ends_in_a_traceback():
    """Each is refused in one line, or it is a whole file with other values within the limits."""
    text, chance = json.dumps(WHOLE), random.Random(3)
    for _ in range(3000):
        place, length = chance.randrange(len(text)), chance.randrange(3)
        other = chance.choice(["", "0", "-", "9", '"', "e", "{", "\n", "\u2028"])
        damaged = text[:place] + other + text[place + length :]
        try:
            parse(damaged)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 400


def test_values_of_a_run_are_looked_at_as_those_of_a_file():
    values = {key: getattr(BUILT_IN, key) for key in CONSTANTS}
    assert constants_of(values) == BUILT_IN
    assert constants_of({**values, "latency": 1}).latency == 1.0
    for change in ({"latency": -1}, {"other": 1}):
        with pytest.raises(ValueError, match="^latency is -1|^'other': no such key"):
            constants_of({**values, **change})
    with pytest.raises(ValueError, match="^largest_staged: missing"):
        constants_of({key: value for key, value in values.items() if key != "largest_staged"})


def test_what_is_measured_is_brought_within_the_limits():
    assert within("latency", 0.0) == 1e-9 and within("latency", 1e3) == 60.0 and within("latency", 1e-5) == 1e-5
    assert within("largest_doubled", 1 << 40) == 1 << 30 and isinstance(within("largest_doubled", 7.0), int)


@pytest.mark.parametrize("constants", EXTREMES)
@pytest.mark.parametrize("nbytes", [0, 1, 1 << 12, 1 << 30, (1 << 30) + 1, 1 << 40])
def test_no_file_makes_a_choice_that_cannot_be(constants, nbytes):
    """On one node auto never takes doubling, whose bits are others."""
    for num_ranks in (2, 3, 8):
        for takes, in_window in ((False, False), (True, False), (True, True)):
            assert choose("auto", nbytes, num_ranks, takes, in_window, False, constants) in ("ring", "windows")
            spread = choose("auto", nbytes, num_ranks, takes, in_window, True, constants)
            assert takes or spread != "windows"
            choose(spread, nbytes, num_ranks, takes, in_window, True, constants)


def test_constants_turn_the_choice_over():
    doubles, rings = Constants(60, 1e-15, 1 << 30, 0), Constants(1e-9, 1e-3, 0, 1 << 50)
    assert by_messages(1 << 26, 8, doubles) == "doubling" and by_messages(4, 8, rings) == "ring"
    assert choose("auto", 4, 8, True, False, False, doubles) == "ring"
    assert choose("auto", 1 << 40, 8, True, False, False, rings) == "windows"
