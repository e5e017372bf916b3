import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.moe import entmax

entmax15 = jax.jit(entmax.entmax15, static_argnums=1)


@functools.partial(jax.jit, static_argnums=2)
def gradient_of(z, cotangent, axis=-1):
    return jax.vjp(lambda z: entmax15(z, axis), z)[1](cotangent)[0]


def by_sorting(z):
    """The closed-form threshold over the last axis, in float64."""
    x = np.asarray(z, np.float64) / 2
    x = x - x.max(-1, keepdims=True)
    ordered = -np.sort(-x, axis=-1)
    count = np.arange(1, x.shape[-1] + 1)
    mean = ordered.cumsum(-1) / count
    variance = (ordered**2).cumsum(-1) / count - mean**2
    taus = mean - np.sqrt(np.maximum(1 / count - variance, 0))
    support = (taus <= ordered).sum(-1, keepdims=True)
    return np.maximum(x - np.take_along_axis(taus, support - 1, -1), 0) ** 2


def gradient_by_differences(z, cotangent, step=1e-6):
    shifts = step * np.eye(z.size).reshape(z.size, *z.shape)
    ahead, behind = by_sorting(z + shifts), by_sorting(z - shifts)
    sums = ((ahead - behind) * cotangent).reshape(z.size, -1).sum(-1)
    return sums.reshape(z.shape) / (2 * step)


def rows(size):
    """Rows from nearly constant to widely spread, of several shapes: (r, size) float32."""
    rng = np.random.default_rng(size)
    draws = [
        rng.normal(size=size),
        rng.uniform(size=size),
        rng.exponential(size=size),
        -rng.exponential(size=size),
        np.clip(rng.standard_cauchy(size=size), -1e3, 1e3),
        -(rng.uniform(size=size) ** 0.3),
        -np.geomspace(1e-6, 1, size),
        -np.minimum(np.arange(size), 1),
    ]
    scales = [1e-6, 1e-3, 0.02, 0.07, 0.15, 0.3, 0.6, 1, 1.9, 2, 10, 1e3]
    return np.stack([scale * draw for draw in draws for scale in scales]).astype(np.float32)


def assert_close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_agrees_with_the_entmax_package(reference):
    ref = reference('entmax15')
    assert_close(entmax15(ref['z']), ref['p'], 1e-5)
    assert_close(entmax15(ref['z_edge']), ref['p_edge'], 1e-5)


def test_gradient_agrees_with_the_entmax_package(reference):
    ref = reference('entmax15')
    assert_close(gradient_of(ref['z'], ref['cotangent']), ref['grad_z'], 1e-4)


def test_edge_rows_have_finite_gradients(reference):
    z = reference('entmax15')['z_edge']
    cotangent = np.random.default_rng(0).normal(size=z.shape).astype(np.float32)
    assert np.isfinite(gradient_of(z, cotangent)).all()


@pytest.mark.parametrize('size', [1, 2, 37, 294, 3000, 10_000])
def test_exact_to_float32_rounding(size):
    z = rows(size)
    p, expected = np.asarray(entmax15(z)), by_sorting(z)
    error = np.abs(p - expected).max(-1) / expected.max(-1)
    assert error.max() < 1e-6
    np.testing.assert_allclose(p.sum(-1, dtype=np.float64), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ('size', 'depths'),
    [(294, [0, 0.415, 1.428, 1.435, 1.435]), (10_000, [0, 0.613, 1.479, 1.48, 1.485, 1.83])],
)
def test_rows_that_converge_slowly_are_exact_too(size, depths):
    """Scores below the largest at geometrically spaced ranks, found by a search for hard rows."""
    ranks = np.append(0, np.geomspace(1, size - 1, len(depths) - 1))
    scores = -np.interp(np.log1p(np.arange(size)), np.log1p(ranks), depths)
    z = scores.astype(np.float32)
    assert_close(entmax15(z), by_sorting(z), 1e-6)


def test_gives_exact_zeros():
    p = entmax15(jnp.array([3.0, 2.9, 0.5, -4.0]))
    assert (p[:2] > 0).all() and (p[2:] == 0).all()


def test_gradient_agrees_with_finite_differences():
    rng = np.random.default_rng(0)
    z, cotangent = rng.normal(size=(2, 3, 7)).astype(np.float32)
    assert_close(gradient_of(z, cotangent), gradient_by_differences(z, cotangent), 1e-5)


@pytest.mark.parametrize('axis', [0, -2, (1, 2), (-1, -4), (0, 1, 2, 3)])
def test_axes_are_taken_together(axis):
    z, cotangent = jax.random.normal(jax.random.key(0), (2, 2, 3, 5, 7))
    axes = (axis,) if isinstance(axis, int) else axis
    last = tuple(range(-len(axes), 0))

    p, gradient = entmax15(z, axis), gradient_of(z, cotangent, axis)

    def flat(x):
        x = jnp.moveaxis(x, axes, last)
        return x.reshape(*x.shape[: -len(axes)], -1)

    assert_close(flat(p), by_sorting(flat(z)), 1e-6)
    assert_close(flat(gradient), gradient_of(flat(z), flat(cotangent)), 1e-6)


def test_masked_entries_get_nothing_and_change_nothing():
    z, cotangent = jax.random.normal(jax.random.key(1), (2, 3, 7))
    mask = jnp.array([True, True, False, True, False, True, True])
    masked = jnp.where(mask, z, -jnp.inf)
    p, gradient = entmax15(masked), gradient_of(masked, cotangent)
    assert (p[:, ~mask] == 0).all() and (gradient[:, ~mask] == 0).all()
    assert_close(p[:, mask], entmax15(z[:, mask]), 1e-6)
    assert_close(gradient[:, mask], gradient_of(z[:, mask], cotangent[:, mask]), 1e-6)


def test_bfloat16_scores_are_computed_in_float32():
    z = jax.random.normal(jax.random.key(2), (3, 37), jnp.bfloat16)
    p = entmax15(z)
    assert p.dtype == jnp.float32
    assert_close(p, by_sorting(z.astype(jnp.float32)), 1e-6)
    assert gradient_of(z, p).dtype == jnp.bfloat16
