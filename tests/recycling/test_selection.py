"""Index selection against recorded sets and known probabilities."""

import itertools

import numpy as np
import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.recycling.selection import (
    generator,
    sampled_indices,
    top_k_indices,
    uniform_indices,
    weight_selection_indices,
)


def test_uniform_sets_are_the_recorded_ones(reference):
    recorded = reference('recycling_uniform')
    np.testing.assert_array_equal(uniform_indices(24, 12), recorded['uniform_channel_idx'])
    np.testing.assert_array_equal(uniform_indices(48, 24), recorded['uniform_mlp_idx'])


def test_uniform_spans_the_ends_and_rounds_halves_to_even():
    np.testing.assert_array_equal(uniform_indices(10, 7), [0, 2, 3, 4, 6, 8, 9])
    np.testing.assert_array_equal(uniform_indices(5, 5), np.arange(5))
    np.testing.assert_array_equal(uniform_indices(5, 1), [0])


def test_weight_selection_takes_every_nth_where_that_divides():
    np.testing.assert_array_equal(weight_selection_indices(12, 4), [0, 3, 6, 9])
    np.testing.assert_array_equal(weight_selection_indices(10, 4), [0, 3, 6, 9])


def test_top_k_takes_the_largest_and_the_first_of_equals():
    np.testing.assert_array_equal(top_k_indices(np.array([1.0, 3, 2, 3, 2]), 3), [1, 2, 3])


def successive_inclusion(weights, k):
    """Inclusion probabilities of drawing one after the other, by enumeration of all orders."""
    total = np.zeros(len(weights))
    for order in itertools.permutations(range(len(weights)), k):
        p, left = 1.0, sum(weights)
        for i in order:
            p *= weights[i] / left
            left -= weights[i]
        total[list(order)] += p
    return total


def test_sampling_has_the_inclusion_probabilities_of_successive_draws():
    weights, k, draws = np.array([0.5, 1.0, 2.0, 4.0, 0.1]), 3, 40_000
    sets = sampled_indices(weights, k, draws, generator(0))
    assert sets.shape == (draws, k)
    assert (np.diff(sets) > 0).all()  # sorted, without repetition
    frequency = np.bincount(sets.ravel(), minlength=5) / draws
    # Five standard errors of a frequency.
    np.testing.assert_allclose(frequency, successive_inclusion(weights, k), atol=0.0125)


def test_units_of_zero_importance_are_taken_only_when_nothing_else_is_left():
    weights = np.array([0.0, 1.0, 0.0, 2.0, 0.0])
    np.testing.assert_array_equal(sampled_indices(weights, 2, 50, generator(0)), [[1, 3]] * 50)
    with_one_more = sampled_indices(weights, 3, 300, generator(0))
    assert (np.isin([1, 3], with_one_more[0])).all()
    rest = with_one_more[~np.isin(with_one_more, [1, 3])]
    assert set(rest) == {0, 2, 4}


def test_streams_of_a_seed_are_repeatable_and_independent():
    a, b = generator(3, 6, 0).random(4), generator(3, 6, 1).random(4)
    np.testing.assert_array_equal(a, generator(3, 6, 0).random(4))
    assert np.abs(a - b).max() > 0
    # The bytes that recycling is made of: they must not change between releases of NumPy.
    np.testing.assert_array_equal(
        sampled_indices(np.arange(1.0, 9.0), 3, 2, generator(0, 6, 1)), [[3, 5, 6], [1, 6, 7]]
    )


@pytest.mark.parametrize('bad', [[1.0, np.nan], [0.0, 0.0], [-1.0, 2.0], [np.inf, 1.0]])
def test_unusable_importance_is_refused(bad):
    with pytest.raises(UserError, match='importance of 2 units'):
        sampled_indices(np.array(bad), 1, 1, generator(0))


def test_more_units_than_there_are_is_refused():
    with pytest.raises(UserError, match='9 units are asked for and the predecessor has 8'):
        uniform_indices(8, 9)
