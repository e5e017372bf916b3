"""Index selection: which of a predecessor's units (channels or neurons) a successor takes.

Every function returns sorted indices and is pure; draws come from a counter-based generator, so
that the same seed gives the same sets on any machine and device count.
"""

import numpy as np

from jetmoe_jax.errors import UserError


def uniform_indices(size: int, k: int) -> np.ndarray:
    """round(linspace(0, size - 1, k)), ties to even: (k,) int64.

    The points are computed in float32 from both ends, as the recorded systems do: it decides ties.
    """
    check_size(size, k)
    if k == 1:
        return np.zeros(1, np.int64)
    step = np.float32(size - 1) / np.float32(k - 1)
    i = np.arange(k, dtype=np.float32)
    from_start, from_end = step * i, np.float32(size - 1) - step * (np.float32(k - 1) - i)
    return np.round(np.where(i < k // 2, from_start, from_end)).astype(np.int64)


def weight_selection_indices(size: int, k: int) -> np.ndarray:
    """Every (size/k)-th if k divides size, else uniform (Xu et al., ICLR 2024): (k,) int64."""
    check_size(size, k)
    return np.arange(0, size, size // k) if size % k == 0 else uniform_indices(size, k)


def top_k_indices(importance: np.ndarray, k: int) -> np.ndarray:
    """The k most important units, the first of equals: (k,) int64, sorted."""
    check_size(len(importance), k)
    return np.sort(np.argsort(-importance, kind='stable')[:k])


def random_indices(size: int, k: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Subsets of k units, every one equally likely: (draws, k) int64, sorted."""
    return sampled_indices(np.ones(size), k, draws, rng)


def sampled_indices(
    importance: np.ndarray, k: int, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """k units without replacement, with probability proportional to importance: (draws, k) int64.

    Each is drawn among what is left; units of zero importance come last, in random order.

    Args:
      importance: (size,), finite and not negative.
    """
    check_size(len(importance), k)
    return np.sort(sampled_order(importance, draws, rng)[:, :k], axis=-1)


def sampled_order(importance: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """All units in the order in which they are drawn without replacement: (draws, size) int64.

    Drawing one after the other, each time among what is left, is the same as sorting independent
    exponential variables with rates `importance` (Efraimidis and Spirakis, 2006).
    """
    importance = np.asarray(importance, np.float64)
    if not np.isfinite(importance).all() or (importance < 0).any() or not importance.any():
        raise UserError(
            f'importance of {len(importance)} units: found NaN, infinite, negative or only zero '
            'values, expected positive ones; collect the statistics again.'
        )
    waiting = -np.log1p(-rng.random((draws, len(importance))))
    with np.errstate(divide='ignore'):
        arrival = np.where(importance > 0, waiting / importance, np.inf)
    return np.lexsort((waiting, arrival), axis=-1)


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A generator of its own for each (seed, stream), whatever else was drawn before."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *stream])))


def check_size(size: int, k: int) -> None:
    """Refuses to take k of `size` units where there are not so many, or k is 0."""
    if not 0 < k <= size:
        raise UserError(
            f'{k} units are asked for and the predecessor has {size}; '
            'choose a successor (or expert width) that is not wider.'
        )
