import pytest

pytest.importorskip("triton")

from kernels import bench_issue

SASS = [(16 * i, "FFMA R1, R2, R3, R1") for i in range(60)]


def test_instructions_of_a_loop_are_those_between_a_backward_branch_and_its_target():
    listing = [*SASS[:50], (800, "@!P0 LDG.E.64 R4, [R2]"), (816, "@P1 BRA 0x20"), (832, "EXIT")]
    names = bench_issue.in_loops(listing)
    assert names.count("FFMA") == 48
    assert names[-2:] == ["LDG", "BRA"]


def test_forward_branches_and_short_loops_do_not_count():
    assert bench_issue.in_loops([*SASS, (960, "BRA 0x3c0"), (976, "BRA 0x3b0"), (992, "BRA 0x400")]) == []


def test_cases_set_options_that_their_kernels_have():
    for case in bench_issue.CASES:
        options = set(case.constants) - {"p_position"}
        assert options <= set(case.kernel.arg_names), case.name
