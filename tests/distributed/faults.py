"""Faults that sharded training has had, each injected into one loop, with the tensor where it must be noticed first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.recorded import DIM, Loop, local

FAULTS: dict[str, Any] = {}

CHANGED = "parameter changed between steps"
UNCLIPPED = "gradient before clipping"
HEAD, QUERY = "head.weight", "layers.0.attend.q.weight"


def fault(
    kind: str | tuple[str, ...], name: str, *, how: str = "fully_shard", before: bool = False, only: str = ""
) -> Any:
    """Register a fault.

    Args:
        kind: The kind of the first tensor that must differ, or some of which each is right.
        name: How its name begins.
        how: How the loop trains.
        before: Inject it before the model is sharded.
        only: The one dtype in which it is a fault.
    """

    def register(inject: Callable[[Loop], None]) -> Callable[[Loop], None]:
        kinds = (kind,) if isinstance(kind, str) else kind
        inject.kinds, inject.place, inject.how, inject.only = kinds, name, how, only  # type: ignore[attr-defined]
        inject.is_before = before  # type: ignore[attr-defined]
        FAULTS[inject.__name__] = inject
        return inject

    return register


def grads(loop: Loop, change: Callable[[torch.Tensor], Any], name: str = "") -> None:
    """Change gradients once they are averaged."""

    def share() -> None:
        for own, param in loop.params().items():
            if param.grad is not None and name in own:
                change(local(param.grad))

    loop.share = share


def forward(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.register_forward_hook(lambda _, args, output: change(output))


# Gradients


@fault(UNCLIPPED, "embed")
def gradients_are_summed(loop: Loop) -> None:
    grads(loop, lambda grad: grad.mul_(loop.world))


@fault(UNCLIPPED, "embed", how="ddp")
def gradients_are_summed_by_ddp(loop: Loop) -> None:
    grads(loop, lambda grad: grad.mul_(loop.world))


@fault(UNCLIPPED, "embed")
def gradients_are_averaged_twice(loop: Loop) -> None:
    grads(loop, lambda grad: grad.div_(loop.world))


@fault(UNCLIPPED, "layers.0.attend.q")
def one_gradient_is_summed(loop: Loop) -> None:
    grads(loop, lambda grad: grad.mul_(loop.world), QUERY)


@fault(UNCLIPPED, "layers.0.up.weight")
def expert_gradients_times_the_group(loop: Loop) -> None:
    grads(loop, lambda grad: grad.mul_(loop.world**2), "layers.0.up.weight")


@fault(UNCLIPPED, "layers.0.attend.q")
def one_gradient_has_the_wrong_sign(loop: Loop) -> None:
    grads(loop, lambda grad: grad.neg_(), QUERY)


@fault(UNCLIPPED, "head.weight")
def one_gradient_is_divided_by_the_root(loop: Loop) -> None:
    grads(loop, lambda grad: grad.div_(math.sqrt(loop.world)), HEAD)


@fault(UNCLIPPED, "head.weight", how="ddp", before=True)
def one_parameter_is_not_reduced(loop: Loop) -> None:
    loop.module._ddp_params_and_buffers_to_ignore = [HEAD]


@fault(UNCLIPPED, "layers.1.norm.weight", how="ddp", before=True)
def a_norm_is_not_reduced(loop: Loop) -> None:
    loop.module._ddp_params_and_buffers_to_ignore = ["layers.1.norm.weight"]


@fault(UNCLIPPED, "head.weight")
def the_last_rank_loses_its_rows(loop: Loop) -> None:
    grads(loop, lambda grad: grad.zero_() if loop.rank == loop.world - 1 else None, HEAD)


@fault(UNCLIPPED, "head.weight", how="ddp")
def the_last_row_has_no_gradient(loop: Loop) -> None:
    grads(loop, lambda grad: grad[-1].zero_(), HEAD)


@fault(UNCLIPPED, "embed")
def a_padding_row_has_no_gradient(loop: Loop) -> None:
    grads(loop, lambda grad: grad[: grad.shape[0] // 2].zero_() if loop.rank == 0 else None, "embed")


@fault(UNCLIPPED, "layers.1.down.weight")
def one_rank_scales_its_shard(loop: Loop) -> None:
    grads(loop, lambda grad: grad.mul_(1.5) if loop.rank == 1 else None, "layers.1.down.weight")


@fault(UNCLIPPED, "layers.1.down.weight", how="ddp")
def one_replica_scales_its_gradient(loop: Loop) -> None:
    grads(loop, lambda grad: grad.mul_(1.5) if loop.rank == 1 else None, "layers.1.down.weight")


@fault(UNCLIPPED, "layers.1.up.weight")
def a_gradient_is_zero(loop: Loop) -> None:
    grads(loop, lambda grad: grad.zero_(), "layers.1.up.weight")


@fault(UNCLIPPED, "layers.1.up.weight")
def a_gradient_is_nan_on_one_rank(loop: Loop) -> None:
    grads(loop, lambda grad: grad.fill_(math.nan) if loop.rank == 1 else None, "layers.1.up.weight")


@fault(UNCLIPPED, "layers.1.up.weight")
def a_gradient_overflows(loop: Loop) -> None:
    grads(loop, lambda grad: grad[0].fill_(math.inf) if loop.rank == 0 else None, "layers.1.up.weight")


@fault(UNCLIPPED, "embed", only="float32")
def gradients_are_reduced_in_bfloat16(loop: Loop) -> None:
    grads(loop, lambda grad: grad.copy_(grad.bfloat16()))


@fault(UNCLIPPED, "layers.0.attend.q")
def gradients_of_query_and_key_are_swapped(loop: Loop) -> None:
    def share() -> None:
        params = loop.params()
        query, key = params[QUERY], params[QUERY.replace(".q.", ".k.")]
        query.grad, key.grad = key.grad, query.grad

    loop.share = share


@fault(UNCLIPPED, "head.weight")
def a_gradient_is_removed(loop: Loop) -> None:
    def share() -> None:
        loop.params()[HEAD].grad = None

    loop.share = share


@fault(UNCLIPPED, "embed")
def gradients_are_not_zeroed(loop: Loop) -> None:
    loop.optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]


@fault(UNCLIPPED, "embed", how="ddp")
def gradients_of_the_step_before_are_used(loop: Loop) -> None:
    kept: dict[str, torch.Tensor] = {}

    def share() -> None:
        for name, param in loop.params().items():
            new = param.grad.clone()
            param.grad.copy_(kept.get(name, new))
            kept[name] = new

    loop.share = share


@fault(UNCLIPPED, "embed", how="ddp")
def no_sync_is_left_on(loop: Loop) -> None:
    loop.model.require_backward_grad_sync = False


@fault(UNCLIPPED, "embed", how="fully_shard")
def gradients_are_counted_twice(loop: Loop) -> None:
    grads(loop, lambda grad: grad.add_(grad.clone()))


@fault(UNCLIPPED, "layers.1.up.bias", how="ddp")
def one_bias_misses_a_contribution(loop: Loop) -> None:
    def share() -> None:
        grad = loop.params()["layers.1.up.bias"].grad
        grad[::2] = 0

    loop.share = share


@fault(UNCLIPPED, "embed", how="ddp")
def a_rank_does_not_take_part(loop: Loop) -> None:
    def share() -> None:
        for param in loop.params().values():
            if loop.rank == 1:
                param.grad.zero_()

    loop.share = share


# The loss


@fault("loss", "", how="ddp")
def loss_is_divided_twice(loop: Loop) -> None:
    batch = loop.batch
    loop.batch = lambda step, place: (batch(step, place)[0], batch(step, place)[1].roll(1, 1))


@fault("gradient of output", "")
def accumulation_is_divided_twice(loop: Loop) -> None:
    loop.loss_scale = 0.5


@fault("gradient of output", "")
def losses_are_summed(loop: Loop) -> None:
    loop.loss_scale = loop.world


@fault("gradient of output", "")
def one_rank_has_no_loss(loop: Loop) -> None:
    loop.loss_scale = 0.0 if loop.rank == 1 else 1.0


@fault("gradient of output", "")
def a_scaler_is_not_undone(loop: Loop) -> None:
    loop.loss_scale = 1024.0


# Data


@fault("input", "")
def the_loader_repeats_samples(loop: Loop) -> None:
    batch = loop.batch
    loop.batch = lambda step, place: batch(0, place)


@fault("input", "")
def all_ranks_get_the_same_samples(loop: Loop) -> None:
    loop.rank = 0


@fault("input", "")
def ranks_get_each_others_samples(loop: Loop) -> None:
    loop.rank = loop.world - 1 - loop.rank


@fault("input", "")
def one_rank_is_a_step_ahead(loop: Loop) -> None:
    batch = loop.batch
    loop.batch = lambda step, place: batch(step + (loop.rank == 1), place)


@fault("loss", "")
def labels_are_shifted(loop: Loop) -> None:
    batch = loop.batch
    loop.batch = lambda step, place: (batch(step, place)[0], batch(step, place)[1].roll(1, 0))


# Initial weights


@fault("initial parameter", "layers.0.attend.q", before=True)
def query_and_key_are_swapped(loop: Loop) -> None:
    attend = loop.module.layers[0].attend
    attend.q, attend.k = attend.k, attend.q


@fault("initial parameter", "layers.0", before=True)
def layers_are_swapped(loop: Loop) -> None:
    first, second = loop.module.layers
    loop.module.layers[0], loop.module.layers[1] = second, first


@fault("initial parameter", "layers.0.attend.q", before=True)
def a_weight_is_transposed(loop: Loop) -> None:
    weight = loop.module.layers[0].attend.q.weight
    weight.data = weight.data.t().contiguous()


@fault("initial parameter", "embed", before=True)
def rows_are_permuted(loop: Loop) -> None:
    weight = loop.module.embed.weight
    weight.data = weight.data.roll(1, 0)


@fault("initial parameter", "head.weight", before=True)
def a_rank_draws_other_weights(loop: Loop) -> None:
    torch.manual_seed(loop.rank)
    torch.nn.init.normal_(loop.module.head.weight, std=0.1)


@fault("initial parameter", "head.bias", before=True)
def a_bias_is_zero(loop: Loop) -> None:
    torch.nn.init.zeros_(loop.module.head.bias)


@fault("initial parameter", "embed", before=True)
def another_initialisation(loop: Loop) -> None:
    torch.nn.init.uniform_(loop.module.embed.weight)


@fault("initial parameter", "head.weight", before=True)
def a_weight_is_infinite(loop: Loop) -> None:
    loop.module.head.weight.data[0, 0] = math.inf


@fault("initial parameter", "head.weight", before=True)
def tied_weights_are_not_tied(loop: Loop) -> None:
    loop.module.head.weight.data.copy_(loop.module.embed.weight.data)


# Forward


@fault("output", "drop")
def dropout_has_other_random_numbers(loop: Loop) -> None:
    loop.module.drop.p = 0.1


@fault("input", "layers.0.up")
def a_buffer_is_not_synchronised(loop: Loop) -> None:
    if loop.rank == 1:
        loop.module.layers[0].scale.mul_(2)


@fault("input", "layers.1.up")
def a_buffer_is_not_saved(loop: Loop) -> None:
    loop.module.layers[1].scale.zero_()


@fault("output", "layers.1.norm", only="float32")
def one_norm_computes_in_bfloat16(loop: Loop) -> None:
    forward(loop.module.layers[1].norm, lambda output: output.bfloat16().float())


@fault("output", "layers.0.norm")
def a_norm_has_another_epsilon(loop: Loop) -> None:
    loop.module.layers[0].norm.eps = 10.0


@fault("output", "layers.0.attend")
def attention_is_causal(loop: Loop) -> None:
    attend = loop.module.layers[0].attend
    attend.forward = lambda x: F.scaled_dot_product_attention(attend.q(x), attend.k(x), attend.v(x), is_causal=True)


@fault("output", "layers.0.attend")
def attention_is_not_scaled(loop: Loop) -> None:
    attend = loop.module.layers[0].attend
    attend.forward = lambda x: F.scaled_dot_product_attention(attend.q(x), attend.k(x), attend.v(x), scale=DIM)


@fault("output", "layers.0.attend")
def key_and_value_are_swapped(loop: Loop) -> None:
    attend = loop.module.layers[0].attend
    attend.forward = lambda x: F.scaled_dot_product_attention(attend.q(x), attend.v(x), attend.k(x))


@fault("output", "layers.1")
def a_layer_is_skipped(loop: Loop) -> None:
    loop.module.layers[1].register_forward_hook(lambda _, args, output: args[0] + 0 * output)


@fault("output", "layers.1")
def a_residual_is_missing(loop: Loop) -> None:
    loop.module.layers[1].register_forward_hook(lambda _, args, output: output - args[0])


@fault("output", "layers.1.up")
def one_rank_computes_nan(loop: Loop) -> None:
    if loop.rank == 1:
        forward(loop.module.layers[1].up, lambda output: output * math.nan)


@fault("output", "layers.1.up")
def one_rank_computes_something_else(loop: Loop) -> None:
    if loop.rank == 1:
        forward(loop.module.layers[1].up, lambda output: output * 1.1)


@fault("output", "embed")
def an_embedding_is_scaled(loop: Loop) -> None:
    forward(loop.module.embed, lambda output: output * math.sqrt(DIM))


@fault("output", "", how="ddp")
def logits_are_softened(loop: Loop) -> None:
    forward(loop.module.head, lambda output: output * 0.7)


# Clipping and the optimizer


@fault("gradient", "embed")
def the_norm_is_that_of_one_shard(loop: Loop) -> None:
    def clip(params: Any, max_norm: float) -> torch.Tensor:
        own = [local(param.grad) for param in params]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad.float()) for grad in own]))
        for grad in own:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    loop.clip = clip


@fault("gradient", "embed")
def clipping_has_another_threshold(loop: Loop) -> None:
    loop.max_norm = 0.05


@fault("gradient", "embed")
def gradients_are_not_clipped(loop: Loop) -> None:
    loop.max_norm = 1e9


@fault("gradient", "embed")
def gradients_are_clipped_twice(loop: Loop) -> None:
    loop.after_clip = lambda: [local(param.grad).mul_(0.5) for param in loop.params().values()]


@fault("setting", "embed")
def the_learning_rate_is_scaled(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= loop.world


@fault("setting", "embed")
def a_step_is_skipped(loop: Loop) -> None:
    loop.after_step = lambda: loop.optimizer.param_groups[0].update(lr=0.0)


@fault("setting", "embed")
def the_schedule_is_a_step_ahead(loop: Loop) -> None:
    loop.after_step = lambda: loop.optimizer.param_groups[0].update(lr=5e-3)


@fault("setting", "embed")
def another_epsilon(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["eps"] = 1.0


@fault("setting", "embed")
def another_beta(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["betas"] = (0.5, 0.999)


@fault("setting", "each parameter[weight_decay]")
def one_bias_decays(loop: Loop) -> None:
    bias = next(param for name, param in loop.params().items() if name.endswith("bias"))
    group = loop.optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if param is not bias]
    loop.optimizer.add_param_group({**group, "params": [bias], "weight_decay": group["weight_decay"] + 0.1})


@fault("setting", "embed.weight[amsgrad]")
def another_variant(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["amsgrad"] = True


@fault(("update", "state"), "embed")
def the_state_is_lost(loop: Loop) -> None:
    loop.after_step = lambda: loop.optimizer.state.clear()


@fault(("update", "state"), "embed")
def momentum_is_zeroed(loop: Loop) -> None:
    loop.after_step = lambda: [local(state["exp_avg"]).zero_() for state in loop.optimizer.state.values()]


# Between steps


@fault(CHANGED, "embed")
def a_stale_average_is_copied_back(loop: Loop) -> None:
    old = local(loop.params()["embed.weight"].detach()).clone()
    loop.after_step = lambda: local(loop.params()["embed.weight"].detach()).copy_(old)


@fault(CHANGED, HEAD, how="ddp")
def one_replica_drifts(loop: Loop) -> None:
    def drift() -> None:
        if loop.rank == 1:
            loop.params()[HEAD].data.mul_(1.05)

    loop.after_step = drift


@fault(CHANGED, "embed", only="float32")
def weights_are_rounded_after_each_step(loop: Loop) -> None:
    def rounded() -> None:
        for param in loop.params().values():
            held = local(param.detach())
            held.copy_(held.bfloat16())

    loop.after_step = rounded


def change_head_after_steps(loop: Loop, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def act() -> None:
        held = local(loop.params()[HEAD].detach())
        held.copy_(change(held).clone())

    loop.after_step = act


@fault(CHANGED, HEAD)
def a_weight_is_negated(loop: Loop) -> None:
    change_head_after_steps(loop, torch.neg)


@fault(CHANGED, HEAD)
def rows_are_flipped(loop: Loop) -> None:
    change_head_after_steps(loop, lambda held: held.flip(0))


@fault(CHANGED, HEAD)
def two_elements_are_swapped(loop: Loop) -> None:
    def swap(held: torch.Tensor) -> torch.Tensor:
        order = torch.arange(held.numel())
        order[0], order[1] = 1, 0
        return held.reshape(-1)[order].view_as(held)

    change_head_after_steps(loop, swap)


@fault(CHANGED, "layers.0.up")
def a_unit_is_not_gathered_again(loop: Loop) -> None:
    def stale() -> None:
        dist.barrier()
        local(loop.params()["layers.0.up.weight"].detach()).mul_(0.9)

    loop.after_step = stale
