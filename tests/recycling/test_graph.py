"""Selection by communities of a co-activation graph."""

import sys

import numpy as np
import pytest

from jetmoe_jax.errors import UserError
from jetmoe_jax.recycling.graph import METHODS, communities, community_indices, excess
from jetmoe_jax.recycling.recipe import Recipe
from jetmoe_jax.recycling.selection import generator

SIZES = (5, 3, 7)
GROUPS = np.repeat(np.arange(3), SIZES)


def planted(shuffled=None):
    """Co-activation counts of three groups of units, each active together in 9 of 10 tokens."""
    rng = np.random.default_rng(0)
    on = (rng.integers(0, 3, 4000)[:, None] == GROUPS) & (rng.random((4000, 15)) < 0.9)
    counts = on.astype('f8').T @ on
    return counts if shuffled is None else counts[np.ix_(shuffled, shuffled)]


def test_excess_is_co_activation_above_chance_without_the_diagonal():
    A = np.array([[9.0, 4, 1], [4, 9, 0], [1, 0, 9]])
    # k = (5, 4, 1): by chance 5 * 4 / 10 = 2 between the first two, 0.5 and 0.4 elsewhere.
    np.testing.assert_allclose(excess(A), [[0, 2, 0.5], [2, 0, 0], [0.5, 0, 0]])


def test_louvain_finds_groups_in_any_order_of_the_units():
    np.testing.assert_array_equal(communities(planted()), GROUPS)
    order = np.random.default_rng(1).permutation(15)
    labels = communities(planted(order), seed=5)
    same = GROUPS[order][:, None] == GROUPS[order]
    np.testing.assert_array_equal(labels[:, None] == labels, same)
    np.testing.assert_array_equal(labels, communities(planted(order), seed=5))
    assert labels[0] == 0  # numbered by their first units


def test_metis_keeps_groups_apart():
    pytest.importorskip('pymetis')
    groups = np.repeat(np.arange(32), 4)
    labels = communities(np.where(groups[:, None] == groups, 10.0, 1.0), 'metis')
    np.testing.assert_array_equal(labels, groups)


def test_metis_that_is_not_installed_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pymetis', None)
    with pytest.raises(UserError, match=r"needs pymetis; pip install 'jetmoe_jax\[graph\]'"):
        Recipe(strategy='graph', communities='metis')
    Recipe(strategy='uniform', communities='metis')  # not used, not needed


def test_communities_are_drawn_by_their_internal_co_activation():
    labels = np.array([0, 0, 1, 1, 2, 2])
    A = np.full((6, 6), 100.0)  # across communities, and on the diagonal, it does not count
    A[[0, 1], [1, 0]], A[[2, 3], [3, 2]], A[[4, 5], [5, 4]] = 6, 3, 1
    sets = community_indices(A, labels, 2, 20_000, generator(0))
    assert (sets[:, 0] + 1 == sets[:, 1]).all()  # whole communities
    share = np.bincount(sets[:, 0], minlength=5)[[0, 2, 4]] / len(sets)
    np.testing.assert_allclose(share, [0.6, 0.3, 0.1], atol=0.015)  # four standard errors
    # Two of them: the pair of the rarest is 0.3 * 1 / 7 + 0.1 * 3 / 9.
    sets = community_indices(A, labels, 4, 20_000, generator(1))
    without_first = (sets[:, 0] == 2).mean()
    np.testing.assert_allclose(without_first, 0.3 / 7 + 0.3 / 9, atol=0.008)


def test_the_last_community_gives_only_what_is_missing_by_its_connections():
    labels = np.array([0, 0, 0, 1, 1])
    A = np.zeros((5, 5))
    A[0, 1], A[1, 2], A[3, 4] = 3, 1, 1000
    A += A.T
    sets = community_indices(A, labels, 3, 20_000, generator(0))
    assert sets.shape == (20_000, 3)
    whole_pair = np.isin(sets, [3, 4]).sum(axis=1) == 2
    assert whole_pair.mean() > 0.99
    # Of the first community one unit: co-activations 3, 4 and 1 within it.
    share = np.bincount(sets[whole_pair][:, 0], minlength=3) / whole_pair.sum()
    np.testing.assert_allclose(share, [3 / 8, 4 / 8, 1 / 8], atol=0.015)


def test_units_that_are_never_active_together_are_drawn_all_alike():
    A = np.diag([1.0, 2, 3, 4])
    labels = communities(A)
    np.testing.assert_array_equal(labels, np.arange(4))
    sets = community_indices(A, labels, 2, 8000, generator(0))
    np.testing.assert_allclose(np.bincount(sets.ravel()) / 8000, 0.5, atol=0.025)


def test_more_units_than_there_are_is_refused():
    with pytest.raises(UserError, match='6 units are asked for and the predecessor has 5'):
        community_indices(np.ones((5, 5)), np.zeros(5, int), 6, 1, generator(0))


@pytest.mark.parametrize('method', ['louvian', 'METIS'])
def test_a_method_that_does_not_exist_is_named(method):
    with pytest.raises(UserError, match='the nearest known one is'):
        Recipe(communities=method)
    assert method not in METHODS
