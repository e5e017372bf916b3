"""V-JetMoE-T's recipe with another MoE layer: Soft MoE, token choice or expert choice.

--config=configs/baseline_t.py:layer=soft,experts=128,data=FOLDER
--config=configs/baseline_t.py:layer=token_choice,init=recycled,strategy=drop_upcycling,dense=...
"""

from jetmoe_jax.training.config import default_config, parse_arg


def get_config(arg=None):
    arg = parse_arg(
        arg,
        dense='',  # the predecessor, which the experts come from
        dense_same='',  # a checkpoint of the same width, which the rest comes from (optional)
        init='random',  # or 'recycled'
        strategy='importance',  # of recycled experts, or 'sparse_upcycling', ...
        data='',  # a folder of train/CLASS/*, val/CLASS/*
        image_size=224,
        layer='soft',  # or 'token_choice', 'expert_choice'
        experts=128,
        epochs=300.0,
        batch=4096,
        lr=4e-3,
        augment='randaugment',  # or 'crop_flip', which also turns mixing and erasing off
    )
    c = default_config()

    c.model = 'vjetmoe_t'
    c.model_overrides.image_size = arg.image_size
    c.model_overrides.drop_path = 0.1
    c.model_overrides.moe = dict(layer=arg.layer, num_experts=arg.experts, dropout=0.4)
    c.init = arg.init
    c.dense = arg.dense
    c.dense_same = arg.dense_same
    c.recycle.strategy = arg.strategy

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
