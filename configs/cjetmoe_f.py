"""C-JetMoE-F: MoE layers in ConvNeXt-Femto, its experts recycled from ConvNeXt-Tiny.

--config=configs/cjetmoe_f.py:dense=TINY.safetensors,dense_same=FEMTO.safetensors,data=FOLDER
"""

from jetmoe_jax.moe.spheromoe import ablate, setting
from jetmoe_jax.training.config import default_config, parse_arg, parse_experts


def get_config(arg=None):
    arg = parse_arg(
        arg,
        dense='',  # the predecessor, which the experts come from
        dense_same='',  # a checkpoint of the same width, which the rest comes from (optional)
        init='recycled',  # or 'random', or 'dense': the checkpoint `dense` as it is
        data='',  # a folder of train/CLASS/*, val/CLASS/*
        image_size=224,
        experts='98+196',  # core + universal in stage 3
        layer='released',  # or 'paper': the layer's published settings
        ablation='',  # a part of the layer to leave out; the names are in docs/spheromoe.md
        epochs=300.0,
        batch=4096,
        lr=4e-3,
        augment='randaugment',  # or 'crop_flip', which also turns mixing and erasing off
    )
    c = default_config()

    c.model = 'cjetmoe_f'
    c.model_overrides.image_size = arg.image_size
    c.model_overrides.drop_path = 0.1
    # Stage 4 has a quarter of the tokens, so a quarter of the experts, an even number: 24 + 48.
    experts = {
        path: (0, 0, count, count // 8 * 2 or min(count, 2))
        for path, count in parse_experts(arg.experts).items()
    }
    c.model_overrides.moe = ablate(setting(arg.layer) | experts, arg.ablation)
    c.init = arg.init
    c.dense = arg.dense
    c.dense_same = arg.dense_same

    c.data.name = arg.data
    c.data.augment = arg.augment
    strong = arg.augment == 'randaugment'

    c.batch_size = arg.batch
    c.epochs = arg.epochs
    c.label_smoothing = 0.1
    c.mixup = 0.8 if strong else 0.0
    c.cutmix = 1.0 if strong else 0.0
    c.random_erasing = 0.25 if strong else 0.0

    c.optimizer.lr = arg.lr
    c.optimizer.weight_decay = 0.05
    c.optimizer.clip_norm = 5.0
    c.optimizer.layer_decay = 0.6
    c.optimizer.warmup_epochs = arg.epochs / 15  # 20 of 300
    return c
