import pytest

from quantrot.evals.statistics import mcnemar, mean_and_stderr, paired

# by hand: 2 (C(n, 0) + ... + C(n, min)) / 2^n, at most 1
BY_HAND = [(0, 0, 1), (1, 0, 1), (5, 0, 2 / 32), (0, 5, 2 / 32), (1, 7, 18 / 256), (4, 4, 1), (2, 6, 74 / 256)]


@pytest.mark.parametrize("b, c, p", BY_HAND)
def test_mcnemar_by_hand(b, c, p):
    assert mcnemar(b, c) == p


def test_mcnemar_survives_thousands_of_pairs():
    assert mcnemar(2000, 2000) == 1
    assert 0 < mcnemar(1800, 2200) < 1e-9


def test_standard_error_by_hand():
    assert mean_and_stderr([1.0, 2.0, 3.0, 6.0]) == pytest.approx((3.0, (14 / 3 / 4) ** 0.5))
    assert mean_and_stderr([4.0]) == (4.0, None)


def test_paired_counts_only_where_the_models_differ():
    result = paired([True, True, False, True, False], [True, False, False, False, True])
    assert (result.n, result.only_model, result.only_baseline) == (5, 2, 1)
    assert result.difference == pytest.approx(0.2)
    assert result.stderr == pytest.approx((0.7 / 5) ** 0.5)  # d = 0 1 0 1 -1, squares about 0.2 sum to 2.8, over 4
    assert result.p_value == 1.0
