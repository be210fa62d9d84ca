"""What a compiled Keras model does with a batch: its loss, metrics and state."""

from __future__ import annotations

from typing import Any


def in_metric_order(model: Any, logs: dict[str, Any]) -> Any:
    """What ``evaluate`` returns without ``return_dict``: one value, or a list in metric order."""
    return model._flatten_metrics_in_order(logs)


def attach_state(model: Any, parts: dict[str, list[Any]] | None) -> None:
    """Let callbacks that look at the model find this state (``Trainer.jax_state_sync``).

    Keras' own ``__setattr__`` would look through the whole state for layers and variables.
    """
    object.__setattr__(model, "_jax_state", parts)
    object.__setattr__(model, "_jax_state_synced", False)


def detach_state(model: Any) -> None:
    """The variables hold the newest state again."""
    object.__setattr__(model, "_jax_state", None)
    object.__setattr__(model, "_jax_state_synced", True)


def initial_epoch_of(model: Any) -> int | None:
    """The epoch that Keras' BackupAndRestore has restored, and asks to go on with."""
    return getattr(model, "_initial_epoch", None)


def state_was_synced(model: Any) -> bool:
    """Whether a callback has taken the state over into the variables, and perhaps changed it."""
    return model._jax_state_synced


def loss_reductions(model: Any) -> list[str]:
    """The reductions of the losses that a model was compiled with."""
    import keras

    default = "sum_over_batch_size"
    asked = getattr(model, "_compile_loss", None)
    losses = keras.tree.flatten(asked._user_loss) if asked is not None else []
    return [str(getattr(loss, "reduction", default)) for loss in losses if loss is not None]


def loss_of_outputs(
    model: Any, values: Any, batch: Any, outputs: Any, losses: list[Any], training: bool
) -> Any:
    """What ``compute_loss_and_updates`` (Keras 3.15) does once the outputs are there.

    ``values`` are those of trainable and other variables, metrics and optimizer; ``losses`` are
    those that layers have added.
    """
    from keras.src import backend

    trained, others, metrics, slots = values
    x, y, weights = batch
    if losses:
        model._losses_override.clear()
        model._losses_override = losses
    loss, (trained, others, metrics) = model.stateless_compute_loss(
        trained,
        others,
        metrics,
        x=x,
        y=y,
        y_pred=outputs,
        sample_weight=weights,
        training=training,
    )
    if losses:
        model._losses_override.clear()
    unscaled = loss
    if training and model.optimizer is not None:
        of_slots = list(zip(model.optimizer.variables, slots, strict=True))
        with backend.StatelessScope(state_mapping=of_slots):
            loss = model.optimizer.scale_loss(loss)
    return loss, (unscaled, outputs, others, metrics)


def update_metrics(model: Any, metrics: list[Any], loss: Any, batch: Any, outputs: Any) -> Any:
    """``(logs, new metrics variables)`` after one batch, without side effects."""
    x, y, weights = batch
    return model._update_metrics_variables(metrics, loss, x, y, outputs, weights)


def logs_at_the_end(model: Any, logs: dict[str, Any], metrics: list[Any]) -> dict[str, Any]:
    """What Keras' loops give at the end of an epoch, where a step of the model's own gave ``logs``.

    Those are the results of the metrics, whose variables have the values ``metrics``, where their
    names are those of the logs, and else the logs.
    """
    from keras.src import backend

    compiled = model._compile_metrics
    if compiled is not None and not compiled.built:
        return logs
    values = list(zip(model.metrics_variables, metrics, strict=True))
    with backend.StatelessScope(state_mapping=values):
        results = model.get_metrics_result()
    return results if set(results) == set(logs) else logs


def has_loss(model: Any) -> bool:
    """Whether a model was compiled with a loss, which compares outputs with targets."""
    return getattr(model, "_compile_loss", None) is not None


def has_own(model: Any, method: str) -> bool:
    """Whether the model's class brings its own ``train_step``, ``test_step`` and so on."""
    from keras.src.backend.jax.trainer import JAXTrainer

    return getattr(type(model), method) is not getattr(JAXTrainer, method)


def masks_of(tensors: Any) -> list[Any]:
    """The masks that Keras has noted on the arrays of a tree; ``None`` where there is none."""
    import jax
    from keras.src.backend import get_keras_mask

    return [get_keras_mask(tensor) for tensor in jax.tree.leaves(tensors)]


def set_masks(tensors: Any, masks: list[Any]) -> None:
    """Note these masks on the arrays of a tree; ``None`` takes a note off."""
    import jax
    from keras.src.backend import get_keras_mask, set_keras_mask

    for tensor, mask in zip(jax.tree.leaves(tensors), masks, strict=True):
        if mask is not get_keras_mask(tensor):
            set_keras_mask(tensor, mask)
