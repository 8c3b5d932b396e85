"""Every test that was found in this session belongs to some part of the suite; none that a case names is only wide.

The part pure finds all tests but those of hosts, so there this speaks for all.
"""

from tests.cases import CASES
from tests.harness.parts import COLLECTED, takes
from tests.suite import PARTS, WIDE


def homeless(items, parts) -> list[str]:
    return [item.nodeid for item in items if not any(takes(part, item) for part in parts)]


def test_every_test_belongs_to_a_part(request):
    items = request.config.stash[COLLECTED]
    assert homeless(items, (*PARTS, *WIDE)) == []
    assert request.node.nodeid in homeless(items, PARTS[1:]), "it would see one that belongs to none"


def test_what_is_not_wide_belongs_to_a_part_of_make_test(request):
    items = request.config.stash[COLLECTED]
    assert homeless([item for item in items if not item.get_closest_marker("wide")], PARTS) == []


def test_what_a_case_names_is_not_left_to_the_part_wide(request):
    items = request.config.stash[COLLECTED]
    found = {item.nodeid.partition("[")[0] for item in items}
    run = {item.nodeid.partition("[")[0] for item in items if not item.get_closest_marker("wide")}
    assert [test for case in CASES for test in case.tests if test in found - run] == []
