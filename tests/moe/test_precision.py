"""bfloat16 beside float32, in the layers and in whole models; and inputs that tempt overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.parameters import param_shapes, unflatten
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.moe.layers import make_layer

SPHEROMOE = dict(core_experts=2, universal_experts=3, z_weight=0.01)
ARGUMENTS = {
    'spheromoe, softmax': SPHEROMOE | dict(combine='softmax'),
    'spheromoe, entmax15': SPHEROMOE | dict(combine='entmax15'),
    'soft': dict(layer='soft', num_experts=5, noise=True, z_weight=0.01),
    'token_choice': dict(
        layer='token_choice',
        num_experts=4,
        batch_priority=True,
        importance_weight=0.01,
        load_weight=0.01,
        gshard_weight=0.01,
        z_weight=0.01,
    ),
    'expert_choice': dict(layer='expert_choice', num_experts=4, z_weight=0.01),
}
DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


def random_values(shapes, scale=0.3):
    """Values for shapes by path: around 1 for scales and temperatures, around 0 for the rest."""
    rng = np.random.default_rng(0)
    return {
        path: jnp.asarray(
            path.endswith(('scale', 'temperature')) + scale * rng.normal(size=leaf.shape), 'f4'
        )
        for path, leaf in shapes.items()
    }


def layer_and_params(name, dtype, d=6):
    layer = make_layer(ARGUMENTS[name] | dict(hidden=16, dtype=dtype))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((2, 7, d)))['params']
    flat = {
        '/'.join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    return layer, unflatten(random_values(flat))


def difference(a, b):
    a, b = np.asarray(a, 'f4'), np.asarray(b, 'f4')
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize('name', ARGUMENTS)
def test_a_layer_routes_in_float32_and_computes_in_bfloat16(name):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 7, 6)), jnp.bfloat16)

    def run(dtype):
        layer, params = layer_and_params(name, dtype)
        apply = jax.jit(lambda p, x: layer.apply({'params': p}, x, mutable=['metrics']))
        y, sown = apply(params, x.astype(dtype))
        assert y.dtype == dtype
        return y, sown['metrics']

    (exact, metrics), (rounded, rounded_metrics) = map(run, DTYPES.values())
    assert 1e-5 < difference(rounded, exact) < 0.03
    # What tells of the routing, from the same tokens: were it rounded, these would be 1e-3 apart.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
                 rounded_metrics, metrics)  # fmt: skip


# The inputs of a sparse router are rounded too, so that a token near the border between two experts
# may change sides and its output with it; these images have no such token.
MODELS = {
    name: ViT(image_size=8, patch_size=4, width=12, depth=1, num_heads=3, num_classes=5,
              moe_blocks=(0,), moe=ARGUMENTS[name])
    for name in ('spheromoe, entmax15', 'soft', 'token_choice', 'expert_choice')
} | {
    'ConvNeXt': ConvNeXt(image_size=8, patch_size=2, widths=(6,), depths=(2,), num_classes=5,
                         moe_blocks=((0, 1),), moe=SPHEROMOE),
}  # fmt: skip


@pytest.mark.parametrize('name', MODELS)
def test_logits_in_bfloat16_are_close_to_those_in_float32(name):
    model = MODELS[name]
    params = unflatten(random_values(param_shapes(model)))
    images = np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype('f4')
    exact, rounded = (
        jax.jit(model.clone(dtype=dtype).apply)({'params': params}, images)
        for dtype in DTYPES.values()
    )
    assert rounded.dtype == jnp.float32
    assert 1e-5 < difference(rounded, exact) < 0.03


EXTREMES = {
    'large tokens': np.random.default_rng(2).choice([-1e4, 1e4, 1.0], size=(2, 7, 6)),
    'large equal tokens': np.full((2, 7, 6), 1e4),
    'equal tokens': np.ones((2, 7, 6)),
    'zeros': np.zeros((2, 7, 6)),
}


@pytest.mark.parametrize(
    'name, dtype',
    [(name, 'bfloat16') for name in ARGUMENTS]
    + [(name, 'float32') for name in ARGUMENTS if name.startswith('spheromoe')],
)
def test_extreme_tokens_and_temperatures_give_finite_outputs_and_gradients(name, dtype):
    layer, params = layer_and_params(name, DTYPES[dtype])

    def loss(params, x):
        noise = {'noise': jax.random.key(0, impl='unsafe_rbg')}  # compiles faster
        y = layer.apply({'params': params}, x)
        y_train, sown = layer.apply({'params': params}, x, True, rngs=noise, mutable=['losses'])
        total = sum(jax.tree.leaves(sown['losses']), jnp.sum(y.astype(jnp.float32)))
        return total + jnp.sum(jnp.sin(y_train.astype(jnp.float32))), (y, y_train)

    evaluate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    for case, x in EXTREMES.items():
        for T in (1.0, 0.01) if 'temperature' in params else (None,):
            given = params if T is None else params | {'temperature': jnp.array([T, T])}
            values = evaluate(given, jnp.asarray(x, DTYPES[dtype]))
            for path, value in jax.tree_util.tree_leaves_with_path(values):
                finite = np.isfinite(np.asarray(value, 'f4')).all()
                assert finite, f'{case}, T = {T}: {jax.tree_util.keystr(path)}'
