"""The ViT against values recorded from timm and the released MoE Jetpack code."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetmoe_jax.checkpoints.files import StateDict
from jetmoe_jax.checkpoints.layout import layout_of
from jetmoe_jax.checkpoints.load import fit
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.parameters import param_count, param_shapes, unflatten
from jetmoe_jax.models.registry import create_model
from jetmoe_jax.models.vit import ViT, attend

REFERENCE = Path(__file__).parents[2] / 'third_party' / 'reference'


def model_of(args, **changes):
    return ViT(
        image_size=args['img_size'],
        patch_size=args['patch_size'],
        width=args['embed_dim'],
        depth=args['depth'],
        num_heads=args['num_heads'],
        num_classes=args['num_classes'],
        pool=args['global_pool'],
        reg_tokens=args.get('reg_tokens', 0),
        no_embed_class=args.get('no_embed_class', False),
        layer_scale=args.get('init_values'),
        qk_norm=args.get('qk_norm', False),
        pre_norm=args.get('pre_norm', False),
        **changes,
    )


def load(fixture, model):
    tensors = {k.removeprefix('state/'): v for k, v in fixture.items() if k.startswith('state/')}
    params, _ = fit(model, StateDict('fixture', tensors))
    return {'params': unflatten(params)}, jnp.asarray(fixture['x_nchw'].transpose(0, 2, 3, 1))


def assert_close(ours, theirs, tolerance=1e-5):
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize(
    'name',
    ['vit_token', 'vit_avg', 'vit_layerscale_reg4_noembedclass', 'vit_qknorm_prenorm'],
)
def test_logits_features_and_activations_agree_with_timm(reference, name):
    fixture = reference(name)
    model = model_of(fixture['args'])
    variables, images = load(fixture, model)
    apply = jax.jit(lambda v, x: model.apply(v, x, mutable=['intermediates']))
    logits, sown = apply(variables, images)
    sown = sown['intermediates']
    assert_close(logits, fixture['logits'])
    assert_close(sown['features'][0], fixture['features'])
    for i in range(model.depth):
        if f'act/block/{i}' not in fixture:
            continue
        block = sown[f'blocks_{i}']
        assert_close(block['output'][0], fixture[f'act/block/{i}'])
        assert_close(block['mlp_input'][0], fixture[f'act/norm2/{i}'])
        assert_close(block['mlp']['mlp_act'][0], fixture[f'act/mlp.act/{i}'])
        assert_close(block['attn']['attn_proj_input'][0], fixture[f'act/attn.proj_input/{i}'])


def test_logits_agree_with_the_released_moe_jetpack_model(reference):
    fixture = reference('moe_jetpack_vit')
    args = fixture['args']
    moe = dict(core_experts=args['core_experts'], universal_experts=args['univ_experts'])
    model = model_of(args, moe_blocks=tuple(args['moe_layers']), moe=moe)
    variables, images = load(fixture, model)
    assert_close(jax.jit(model.apply)(variables, images), fixture['logits'])


def test_vjetmoe_t_has_the_published_parameters():
    model = create_model('vjetmoe_t')
    released = json.loads((REFERENCE / 'moe_jetpack_vjetmoe_t_state.json').read_text())
    ours = {}
    for path, leaf in param_shapes(model).items():
        ours |= {
            name: list(shape)
            for name, shape in layout_of(model).tensor_shapes(path, leaf.shape).items()
        }
    assert param_count(model) == released['params'] == 265_411_636
    assert ours == released['state']


def test_evaluation_is_deterministic_and_training_is_not():
    moe = dict(core_experts=3, universal_experts=5, expert_dropout=0.2, dropout=0.4)
    model = ViT(image_size=8, patch_size=4, width=12, depth=2, num_heads=3, num_classes=5,
                moe_blocks=(1,), moe=moe, drop_path=0.3)  # fmt: skip
    images = jax.random.normal(jax.random.key(1), (7, 8, 8, 3))
    rng = np.random.default_rng(0)
    params = {k: 0.3 * rng.normal(size=v.shape) for k, v in param_shapes(model).items()}
    variables = {'params': unflatten(jax.tree.map(jnp.float32, params))}
    evaluate = jax.jit(model.apply)

    @jax.jit
    def train(seed):
        a, b = jax.random.split(jax.random.key(seed))
        return model.apply(variables, images, True, rngs={'dropout': a, 'noise': b})

    np.testing.assert_array_equal(evaluate(variables, images), evaluate(variables, images))
    np.testing.assert_array_equal(train(0), train(0))
    assert np.abs(train(0) - train(1)).max() > 1e-4


def test_expert_dropout_grows_linearly_over_depth():
    model = create_model('vjetmoe_t', moe=dict(expert_dropout=0.11))
    rates = [model.moe_layer(path).expert_dropout for path in model.moe_paths]
    np.testing.assert_allclose(rates, [0.06, 0.07, 0.08, 0.09, 0.1, 0.11])


@pytest.mark.parametrize(
    'wrong, message',
    [
        (dict(pool='max'), "pool is 'max'; use one of token, avg."),
        (dict(class_token=False), 'has no class token'),
        (dict(num_heads=5), 'width 12 is not a multiple of num_heads 5'),
        (dict(patch_size=3), '(8, 8) is not a multiple of 3, the pixels of a token'),
        (dict(image_size=12), 'images are (8, 8, 3), the model takes (12, 12, 3)'),
        (dict(moe_blocks=(2,), moe=dict(core_experts=1, universal_experts=1)), 'moe_blocks (2,)'),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    sizes = dict(image_size=8, patch_size=4, width=12, depth=2, num_heads=3)
    with pytest.raises(UserError) as error:
        ViT(**(sizes | wrong)).init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    assert message in str(error.value)


@pytest.mark.parametrize('offset', [0.0, 50.0])
def test_attention_in_bfloat16_has_the_gradients_of_float32(offset):
    """What all values have in common gives the queries and keys no gradient, nor its rounding."""
    rng = np.random.default_rng(0)
    q, k, v, c = rng.standard_normal((4, 2, 2, 33, 8)).astype(np.float32)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v + offset, c)]

    def gradients(q, k, v, c):
        return jax.vjp(attend, q, k, v)[1](c)

    def plain(q, k, v, c):
        weights = lambda q, k: jax.nn.softmax(jnp.einsum('bhqc,bhkc->bhqk', q, k))  # noqa: E731
        return jax.vjp(lambda q, k, v: weights(q, k) @ v, q, k, v)[1](c)

    found = jax.jit(gradients)(*rounded)
    for ours, theirs in zip(found, jax.jit(plain)(*map(jnp.float32, rounded)), strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.abs(np.float32(ours) - theirs).max() / np.abs(theirs).max()
        assert error < 0.03
