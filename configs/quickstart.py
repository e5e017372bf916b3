"""The whole pipeline, small: two ViTs of MNIST -> V-JetMoE -> UCI digits, beside random weights.

python -m jetmoe_jax.main --config=configs/quickstart.py
"""

from jetmoe_jax.checkpoints.shipped import shipped_path
from jetmoe_jax.training.config import default_config, parse_arg


def get_config(arg=None):
    arg = parse_arg(arg, seed=0, epochs=20.0)
    c = default_config()
    c.seed = arg.seed

    c.model = 'vjetmoe_t'
    c.model_overrides.width = 48
    c.model_overrides.depth = 6
    c.model_overrides.num_heads = 3
    c.model_overrides.moe_blocks = (3, 4, 5)
    c.model_overrides.moe = dict(core_experts=8, universal_experts=16)
    c.model_overrides.drop_path = 0.1
    c.init = 'recycled'
    c.dense = shipped_path('digits_vit_96')
    c.dense_same = shipped_path('digits_vit_48')
    c.compare_random = True

    c.recycle.strategy = 'importance'
    c.recycle.calibration_images = 512

    c.data.name = 'digits'
    c.data.augment = 'shift'
    c.data.crop_fraction = 1.0

    c.batch_size = 64
    c.epochs = arg.epochs
    c.label_smoothing = 0.1
    c.mixup = 0.0
    c.cutmix = 0.0
    c.random_erasing = 0.0

    c.optimizer.lr = 1e-3
    c.optimizer.layer_decay = 1.0  # fair to the random model, whose first blocks must learn too
    c.optimizer.warmup_epochs = 1.0

    c.eval_every_epochs = 1.0
    c.log_every_steps = 20
    return c
