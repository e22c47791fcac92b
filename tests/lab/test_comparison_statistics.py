"""Statistics of pairs against published numbers."""

import pytest

from polyhead.lab.comparison.statistics import Difference, paired, pairs_needed, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "published"),
    [  # Fisher & Yates 1963, table III; NIST handbook 1.3.6.7.2
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.975, 7, 2.365),
        (0.975, 30, 2.042),
        (0.975, 100, 1.984),
        (0.95, 5, 2.015),
        (0.999, 3, 10.215),
        (0.9, 10, 1.372),
        (0.025, 4, -2.776),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(probability, freedom, published):
    assert t_quantile(probability, freedom) == pytest.approx(published, abs=5.1e-4)


def test_quantiles_of_t_where_they_have_a_formula():
    assert t_quantile(0.75, 1) == pytest.approx(1.0, abs=1e-12)  # tan(π/4)
    assert t_quantile(0.975, 2) == pytest.approx(0.95 / (2 * 0.975 * 0.025) ** 0.5, rel=1e-12)
    assert t_quantile(0.975, 10**4) == pytest.approx(1.960201, abs=1e-6)


def test_interval_of_students_own_example():
    """Student 1908: the additional hours of sleep that two drugs gave ten patients."""
    first = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    second = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    found = paired(first, second)
    assert found.mean == pytest.approx(1.58)
    assert found.mean - found.half_width == pytest.approx(0.7001142, abs=1e-6)
    assert found.mean + found.half_width == pytest.approx(2.4598858, abs=1e-6)
    assert found.pairs == 10
    assert found.distinguishable


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_pairs_that_a_difference_needs_are_those_of_power_tables(effect, pairs):
    """G*Power 3.1, paired t test, two-sided, α 0.05, power 0.8."""
    assert pairs_needed(effect, 1.0) == pairs
    assert pairs_needed(-effect * 3, 3.0) == pairs


def test_no_number_of_pairs_tells_nothing_from_nothing():
    assert pairs_needed(0.0, 1.0) is None
    assert pairs_needed(1e-9, 1.0) is None
    assert pairs_needed(0.01, 1.0) is None  # 78,490
    assert pairs_needed(0.5, 0.0) == 2


def test_interval_that_holds_nothing_is_not_distinguishable():
    assert not paired([1.0, 2.0, 3.0], [1.1, 1.9, 3.0]).distinguishable
    assert not Difference(0.1, 0.1, 1.0, 2, None).distinguishable


@pytest.mark.parametrize(("first", "second"), [([1.0], [2.0]), ([], []), ([1.0, 2.0], [1.0])])
def test_interval_of_fewer_than_two_pairs_is_refused(first, second):
    with pytest.raises(ValueError, match="two pairs or more"):
        paired(first, second)


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_quantiles_out_of_range_are_refused(probability, freedom):
    with pytest.raises(ValueError, match=r"(probability|freedom) must be"):
        t_quantile(probability, freedom)
