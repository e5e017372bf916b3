"""What is exported comes back as the same model, also where shapes alone would mislead."""

import numpy as np
import pytest

from jetmoe_jax.checkpoints.load import Checkpoint, LoadReport, load_checkpoint, save_checkpoint
from jetmoe_jax.errors import UserError
from jetmoe_jax.models.convnext import ConvNeXt
from jetmoe_jax.models.parameters import param_shapes
from jetmoe_jax.models.vit import ViT

SMALL = dict(patch_size=4, width=12, depth=2, num_heads=3, num_classes=5)
REGISTERS = dict(reg_tokens=2, no_embed_class=True)
MODELS = {
    'wide images': ViT(image_size=(32, 8), **SMALL),
    'oblong images': ViT(image_size=(24, 16), **SMALL),
    'registers': ViT(image_size=32, **REGISTERS, **SMALL),
    'an ambiguous grid': ViT(image_size=12, **(REGISTERS | dict(reg_tokens=4)), **SMALL),
    'universal experts alone': ViT(
        image_size=8,
        moe_blocks=(0, 1),
        moe=dict(core_experts=0, universal_experts=3, universal_factor=0.5),
        **SMALL,
    ),
    'fine-grained experts in all blocks': ViT(
        image_size=8,
        moe_blocks=(0, 1),
        moe=dict(core_experts=3, universal_experts=2, hidden_factor=0.5, query_l2norm=False),
        **SMALL,
    ),
    'ConvNeXt with fine-grained experts': ConvNeXt(
        image_size=16,
        patch_size=2,
        widths=(4, 8),
        depths=(1, 1),
        num_classes=4,
        moe_blocks=((0, 0), (1, 0)),
        mlp_ratio=3.0,
        moe=dict(
            core_experts=(3, 5),
            universal_experts=(4, 0),
            hidden_factor=(0.5, 0.25),
            combine='softmax',
        ),
    ),
    'ConvNeXt': ConvNeXt(image_size=16, patch_size=2, widths=(3, 5), depths=(1, 2), num_classes=4),
}


def random_checkpoint(model):
    rng = np.random.default_rng(0)
    shapes = param_shapes(model)
    params = {path: rng.normal(size=leaf.shape).astype('f4') for path, leaf in shapes.items()}
    return Checkpoint(model, params, LoadReport('made'))


@pytest.mark.parametrize('name', MODELS)
def test_an_export_comes_back_as_the_same_model(tmp_path, name):
    checkpoint = random_checkpoint(MODELS[name])
    save_checkpoint(tmp_path / 'x.safetensors', checkpoint)
    loaded = load_checkpoint(tmp_path / 'x.safetensors')
    assert loaded.model.image_shape == checkpoint.model.image_shape
    assert param_shapes(loaded.model) == param_shapes(checkpoint.model)
    assert (loaded.model.moe is None) == (checkpoint.model.moe is None)
    for argument in ('combine', 'query_l2norm') if loaded.model.moe else ():
        layers = [model.moe_layer(model.moe_paths[0]) for model in (loaded.model, checkpoint.model)]
        assert getattr(layers[0], argument) == getattr(layers[1], argument)
    for path, value in checkpoint.params.items():
        np.testing.assert_array_equal(loaded.params[path], value, err_msg=path)


def test_a_shared_temperature_has_no_place_in_an_export(tmp_path):
    moe = dict(core_experts=2, universal_experts=3, shared_temperature=True)
    checkpoint = random_checkpoint(ViT(image_size=8, moe_blocks=(1,), moe=moe, **SMALL))
    with pytest.raises(UserError) as error:
        save_checkpoint(tmp_path / 'x.safetensors', checkpoint)
    assert str(error.value) == (
        "blocks_1/moe/temperature is one shared temperature, and MoE Jetpack's files hold two; "
        'keep the model in a folder instead.'
    )
    assert not list(tmp_path.iterdir())


def test_a_weight_too_large_for_float16_is_refused(tmp_path):
    checkpoint = random_checkpoint(MODELS['registers'])
    checkpoint.params['norm/bias'][3] = 1e6
    with pytest.raises(UserError, match='norm.bias is too large for float16'):
        save_checkpoint(tmp_path / 'x.safetensors', checkpoint, np.float16)
    assert not list(tmp_path.iterdir())


def test_class_names_do_not_outlive_their_head(tmp_path):
    checkpoint = random_checkpoint(MODELS['registers'])
    checkpoint.class_names = tuple('abcde')
    save_checkpoint(tmp_path / 'x.safetensors', checkpoint)
    assert load_checkpoint(tmp_path / 'x.safetensors').class_names == tuple('abcde')
    assert load_checkpoint(tmp_path / 'x.safetensors', num_classes=7).class_names == ()
