"""Selection by co-activation: units that are active together are taken together.

A matrix of co-activation (u u) says how often each pair of units was > 0 together. It becomes a
graph, the graph is split into communities, and a set of units is filled community by community.
"""

import networkx as nx
import numpy as np

from jetmoe_jax.errors import UserError
from jetmoe_jax.recycling.selection import check_size, sampled_order

METHODS = ('louvain', 'metis')
METIS_PARTS = 32
METIS_TOTAL = 1e9  # METIS wants whole weights, and adds them up in 32 bits


def excess(co_activation: np.ndarray) -> np.ndarray:
    """How much more often two units are active together than chance would have it: (u u) >= 0.

    max(A_ij - k_i k_j / sum(k), 0) with A the co-activation without its diagonal and k its row
    sums: what counts for a community's modularity. About half of the edges go, those that would
    only speak for a split.
    """
    A = _without_diagonal(co_activation)
    k = A.sum(axis=0)
    total = k.sum()
    return np.maximum(_without_diagonal(A - np.outer(k, k) / total), 0) if total else A


def communities(co_activation: np.ndarray, method: str = 'louvain', seed: int = 0) -> np.ndarray:
    """The community of every unit: (u,) int64, numbered by their first units.

    Args:
      co_activation: (u u), symmetric; its diagonal is ignored.
      method: 'louvain' (Blondel et al., 2008) or 'metis' (Karypis and Kumar, 1998; 32 parts at
        most), both on the graph of `excess`.
      seed: of the order in which Louvain visits units, or METIS coarsens.

    Raises:
      UserError: 'metis' and pymetis is not installed.
    """
    weights = excess(co_activation)
    labels = (_metis if method == 'metis' else _louvain)(weights, seed)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def community_indices(
    co_activation: np.ndarray, labels: np.ndarray, k: int, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """k units, community by community: (draws, k) int64, sorted.

    Communities are drawn without replacement with probability proportional to their internal
    co-activation (the sum over pairs of their units) until there are k units. Of the last one only
    as many are taken as are needed, drawn without replacement with probability proportional to
    their co-activation within it, so that experts differ even where there are few communities.

    Args:
      co_activation: (u u), symmetric; its diagonal is ignored.
      labels: (u,), the community of every unit.
    """
    check_size(len(labels), k)
    A = _without_diagonal(co_activation)
    within = np.where(labels[:, None] == labels, A, 0).sum(axis=1)
    internal = np.bincount(labels, within)
    members = [np.flatnonzero(labels == label) for label in range(len(internal))]
    sets = np.empty((draws, k), np.int64)
    for i, order in enumerate(sampled_order(_positive(internal), draws, rng)):
        taken = 0
        for label in order:
            units = members[label]
            if len(units) > k - taken:
                drawn = sampled_order(_positive(within[units]), 1, rng)[0]
                units = units[drawn[: k - taken]]
            sets[i, taken : taken + len(units)] = units
            taken += len(units)
            if taken == k:
                break
    return np.sort(sets, axis=1)


def check_method(method: str) -> None:
    """Refuses METIS where it is not installed."""
    if method == 'metis':
        _pymetis()


def _louvain(weights: np.ndarray, seed: int) -> np.ndarray:
    graph = nx.Graph()
    graph.add_nodes_from(range(len(weights)))
    i, j = np.nonzero(np.triu(weights, 1))
    graph.add_weighted_edges_from(zip(i.tolist(), j.tolist(), weights[i, j].tolist(), strict=True))
    labels = np.empty(len(weights), np.int64)
    for label, units in enumerate(nx.community.louvain_communities(graph, seed=seed)):
        labels[sorted(units)] = label
    return labels


def _metis(weights: np.ndarray, seed: int) -> np.ndarray:
    pymetis = _pymetis()
    i, j = np.nonzero(weights)
    starts = np.searchsorted(i, np.arange(len(weights) + 1))
    whole = np.ceil(weights[i, j] / max(weights.sum(), 1e-30) * METIS_TOTAL).astype(np.int64)
    parts = min(METIS_PARTS, len(weights))
    adjacency = pymetis.CSRAdjacency(starts, j)
    options = pymetis.Options(seed=seed)
    _, labels = pymetis.part_graph(parts, adjacency, eweights=whole, options=options)
    return np.asarray(labels, np.int64)


def _pymetis():
    try:
        import pymetis
    except ImportError as error:
        raise UserError(
            "communities is 'metis', which needs pymetis; pip install 'jetmoe_jax[graph]', or use "
            "'louvain'."
        ) from error
    return pymetis


def _without_diagonal(x: np.ndarray) -> np.ndarray:
    x = np.array(x, np.float64)
    np.fill_diagonal(x, 0)
    return x


def _positive(importance: np.ndarray) -> np.ndarray:
    """As it is, or all equal where nothing is connected."""
    return importance if importance.any() else np.ones_like(importance)
