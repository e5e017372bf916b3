import numpy as np
import pytest

from jetmoe_jax.checkpoints.resample import resample_pos_embed
from jetmoe_jax.errors import UserError


def pos_embed(tokens, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(1, tokens, 5)).astype(dtype)


@pytest.mark.parametrize('grid', [(16, 16), (24, 18), (50, 50)])
def test_agrees_with_timm(reference, grid):
    ref = reference('resample_abs_pos_embed')
    expected = ref[f'to_{grid[0]}x{grid[1]}']
    out = resample_pos_embed(ref['pos_embed'], grid, prefix_tokens=1)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_result_is_float32(dtype):
    for grid in [(3, 3), (4, 2)]:
        assert resample_pos_embed(pos_embed(10, dtype), grid, prefix_tokens=1).dtype == np.float32


def test_unchanged_grid_gives_the_same_values():
    x = pos_embed(2 + 15)
    out = resample_pos_embed(x, (3, 5), prefix_tokens=2, source_grid=(3, 5))
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize('prefix_tokens', [1, 5])
def test_prefix_is_left_alone(prefix_tokens):
    x = pos_embed(prefix_tokens + 9)
    out = resample_pos_embed(x, (4, 7), prefix_tokens=prefix_tokens)
    assert out.shape == (1, prefix_tokens + 28, 5)
    np.testing.assert_array_equal(out[:, :prefix_tokens], x[:, :prefix_tokens])
    without = resample_pos_embed(x[:, prefix_tokens:], (4, 7), prefix_tokens=0)
    np.testing.assert_array_equal(out[:, prefix_tokens:], without)


def test_source_grid_need_not_be_square():
    rows = np.arange(3.0)[:, None, None] * np.ones((3, 5, 2))
    out = resample_pos_embed(
        rows.reshape(1, 15, 2), (6, 7), prefix_tokens=0, source_grid=(3, 5)
    ).reshape(6, 7, 2)
    assert (np.diff(out[:, 0, 0]) > 0).all()
    np.testing.assert_allclose(out, out[:, :1, :1] * np.ones((6, 7, 2)), atol=1e-6)


def test_same_number_of_positions_in_another_grid_is_resampled():
    x = pos_embed(16)
    assert not np.allclose(resample_pos_embed(x, (2, 8), prefix_tokens=0), x)


@pytest.mark.parametrize('tokens', [12, 0, -1])
def test_positions_that_are_no_square_are_refused(tokens):
    with pytest.raises(UserError, match=rf'has {tokens} positions after 1 .* give source_grid='):
        resample_pos_embed(pos_embed(1 + tokens), (4, 4), prefix_tokens=1)


def test_source_grid_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match='has 12 positions .* source grid 3x5 has 15'):
        resample_pos_embed(pos_embed(12), (4, 4), prefix_tokens=0, source_grid=(3, 5))
