"""The training step and the evaluation step, each one jitted function over the mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from jetmoe_jax.data.mixing import mixup_cutmix, normalise, random_erase
from jetmoe_jax.models.parameters import flatten
from jetmoe_jax.training.sharding import BATCH, on_mesh, tree_shardings
from jetmoe_jax.training.state import TrainState

Metrics = dict[str, jax.Array]


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: ConfigDict,
    mean: Sequence[float],
    std: Sequence[float],
    mesh: Mesh,
    state: TrainState,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, Metrics]]:
    """step(state, {'image': uint8 (b height width 3), 'label': int32 (b,)}) -> (state, metrics).

    Augmentation on the device, loss, gradients and AdamW in one compiled function. Its random
    numbers are a function of (state.rng, state.step) alone. The old state's memory is reused. The
    metrics are 'loss' (without the auxiliary losses that the gradient has), 'grad_norm', 'lr',
    'param_norm', and those of every router by its path ('blocks_6/moe/combine_entropy').

    Args:
      state: of the shapes and shardings that the step will be called with.
    """

    def loss_fn(
        params: Any, images: jax.Array, labels: jax.Array, rngs: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        logits, sown = model.apply(
            {'params': params}, images, True, rngs=rngs, mutable=['losses', 'metrics']
        )
        loss = optax.softmax_cross_entropy(logits, labels).mean()
        auxiliary = sum(jax.tree.leaves(sown.get('losses', {})), start=jnp.zeros(()))
        routers = {path: value for path, (value,) in flatten(sown.get('metrics', {})).items()}
        return loss + auxiliary, {'loss': loss} | routers

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        erase_rng, mix_rng, dropout_rng, noise_rng = jax.random.split(rng, 4)

        images = normalise(batch['image'], mean, std)
        images = random_erase(erase_rng, images, config.random_erasing)
        labels = jax.nn.one_hot(batch['label'], model.num_classes)
        labels = optax.smooth_labels(labels, config.label_smoothing)
        images, labels = mixup_cutmix(mix_rng, images, labels, config.mixup, config.cutmix)

        rngs = {'dropout': dropout_rng, 'noise': noise_rng}
        gradient = jax.grad(loss_fn, has_aux=True)
        grads, metrics = gradient(state.params, images, labels, rngs)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = optax.incremental_update(params, ema, 1 - config.ema_decay)
        metrics |= {
            'grad_norm': optax.tree.norm(grads),
            'param_norm': optax.tree.norm(params),
            'lr': schedule(state.step),
        }
        state = state.replace(step=state.step + 1, params=params, ema=ema, opt_state=opt_state)
        return state, metrics

    shardings = tree_shardings(state, mesh)
    jitted = jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, BATCH)),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    return on_mesh(jitted, mesh)


def make_eval_step(
    model: nn.Module, mean: Sequence[float], std: Sequence[float], mesh: Mesh
) -> Callable[[Any, dict[str, jax.Array]], Metrics]:
    """step(params, batch) -> sums over the batch's images: 'count', 'loss', 'top1', 'top5'."""

    @jax.jit
    def step(params: Any, batch: dict[str, jax.Array]) -> Metrics:
        logits = model.apply({'params': params}, normalise(batch['image'], mean, std))
        label, mask = batch['label'], batch['mask']
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        at_label = jnp.take_along_axis(logits, label[:, None], axis=1)
        # Ties count against the label, and so does NaN: constant or broken logits score nothing.
        rank = jnp.sum(~(logits < at_label), axis=1) - 1
        return {
            'count': mask.sum(),
            'loss': (loss * mask).sum(),
            'top1': ((rank < 1) * mask).sum(),
            'top5': ((rank < 5) * mask).sum(),
        }

    return on_mesh(step, mesh)
