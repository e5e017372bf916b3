"""The MoE layers by name, inside a model: what they sow, and wrong names."""

import jax
import numpy as np
import pytest

from jetmoe_jax.analysis.cost import model_cost
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.vit import ViT
from jetmoe_jax.moe.layers import LAYERS, make_layer

ARGUMENTS = {
    'spheromoe': dict(core_experts=2, universal_experts=3, combine='softmax', z_weight=0.5),
    'soft': dict(num_experts=5, z_weight=0.5),
    'token_choice': dict(num_experts=4, importance_weight=0.5),
    'expert_choice': dict(num_experts=4, z_weight=0.5),
}


@pytest.mark.parametrize('name', LAYERS)
def test_every_layer_works_in_a_model_and_tells_of_its_routing(name):
    moe = ARGUMENTS[name] | {'layer': name}
    model = ViT(image_size=8, patch_size=4, width=12, depth=2, num_heads=3, num_classes=5,
                moe_blocks=(1,), moe=moe)  # fmt: skip
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 3)).astype('f4')

    @jax.jit
    def run(key):
        params = model.init(key, images)['params']
        rngs = {'noise': key, 'dropout': key}
        return model.apply({'params': params}, images, True, rngs=rngs,
                           mutable=['losses', 'metrics'])  # fmt: skip

    logits, sown = run(jax.random.key(0))
    metrics = sown['metrics']['blocks_1']['moe']
    assert logits.shape == (3, 5)
    assert 0 <= float(metrics['combine_entropy'][0]) <= np.log(20)
    (loss,) = jax.tree.leaves(sown['losses'])
    unweighted = metrics['importance_loss' if name == 'token_choice' else 'z_loss'][0]
    np.testing.assert_allclose(loss, 0.5 * unweighted, rtol=1e-6)
    assert model_cost(model).multiply_adds > 0


def test_paths_share_the_combine_weights():
    layer = make_layer(ARGUMENTS['spheromoe'])
    x = np.random.default_rng(0).normal(size=(2, 7, 6)).astype('f4')
    params = jax.jit(layer.init)(jax.random.key(0), x)
    _, sown = jax.jit(lambda p: layer.apply(p, x, mutable=['metrics']))(params)
    shares = [sown['metrics'][f'{path}_share'][0] for path in ('core_experts', 'universal_experts')]
    np.testing.assert_allclose(sum(shares), 1, rtol=1e-5)
    # At equal weights each path would get its share of the slots, 2 and 3 of 5.
    np.testing.assert_allclose(shares, [0.4, 0.6], atol=0.2)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(layer='soft_moe'), "MoE layer 'soft_moe' does not exist; the nearest known one is"),
        (dict(layer='soft', core_experts=3), "argument of the MoE layer soft 'core_experts'"),
        (dict(experts=3), "argument of the MoE layer spheromoe 'experts' does not exist"),
    ],
)
def test_wrong_names_are_told(arguments, message):
    with pytest.raises(UserError) as error:
        make_layer(arguments)
    assert message in str(error.value)
