"""Invariants: rules that hold in a healthy training at every step, and the texts of warnings.

The rows have the form of those of ``rules``. Each reports once in a run, or once for each tensor.
Facts that no record holds come from ``monitor/loop/facts.py``, which counts updates in a row:
``value`` is that count, and ``name`` what the fact is about; ``checks`` says how often a form was
seen in a graph. docs/invariants.md has the table in words.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from fastcheck.record.format import DTYPES

from . import rules
from .rules import NumberRule, TensorRule, never
from .signals import ABS_MAX, BUFFER, INPUT, IS_FLOAT
from .view import StepsView

# The number of updates in a row in which a weight that moved before stands still.
_STANDING = 48
# The ratio of the norm of all gradients to the clipping threshold, and the steps in a row.
_CLIPS, _CLIP_STEPS = 1000.0, 100
# Updates that a scaler skips in a row without a smaller scale.
_STUCK = 5
_IGNORED = -100
#: The ratio of the learning rate to its largest value, and the steps in a row.
LEAST_RATE, _TINY_STEPS = 1e-6, 20
_COUNTED = 32
# The largest number up to which a 16-bit format holds all whole numbers; 0: a wider format.
_WHOLE = np.array([{"bfloat16": 256, "float16": 2048}.get(d.name, 0) for d in DTYPES])


def _once(view: StepsView) -> np.ndarray:
    return np.zeros(view.now.is_read.shape, bool)


def stands_still(is_wide: bool) -> Callable[[StepsView], np.ndarray]:
    """A condition for weights that kept every bit in updates that should have moved them."""

    def condition(view: StepsView) -> np.ndarray:
        is_still: np.ndarray = view.standing >= _STANDING
        return is_still & ((_WHOLE[view.now.codes] == 0) == is_wide) if is_still.any() else is_still

    return condition


def counter_will_stop(view: StepsView) -> np.ndarray:
    """True where a buffer holds growing whole numbers and comes near the size from which adding 1
    changes nothing. Between 32 and that size the format has fractions too, so it is a counter.
    """
    now, limit = view.now, _WHOLE[view.now.codes]
    is_counter: np.ndarray = (now.phases == BUFFER) & (limit > 0) & now.is_whole
    if is_counter.any():
        with np.errstate(invalid="ignore"):
            is_counter &= now.levels[ABS_MAX] > view.peak
        is_counter &= (now.abs_max >= _COUNTED) & (now.abs_max <= limit)
    return is_counter


def position_is_rounded(view: StepsView) -> np.ndarray:
    """True where an input of the model holds whole numbers so large that the format can't represent
    all of them.
    """
    now, limit = view.now, _WHOLE[view.now.codes]
    is_rounded: np.ndarray = (now.phases == INPUT) & (limit > 0) & now.is_count
    return is_rounded & (now.abs_max > limit) if is_rounded.any() else is_rounded


def labels_are_ignored(view: StepsView) -> np.ndarray:
    """True where every label is the number that torch's cross entropy ignores."""
    now = view.now
    is_unlabelled: np.ndarray = (now.phases == INPUT) & now.is_equal
    if is_unlabelled.any():
        with np.errstate(invalid="ignore"):
            is_unlabelled &= now.sums == _IGNORED * now.numel
    return is_unlabelled


def input_is_constant(view: StepsView) -> np.ndarray:
    """True where all inputs of the model are constant: 0 for floating-point tensors, any number for
    others.
    """
    now = view.now
    of_model = (now.phases == INPUT) & now.is_read
    if not (of_model & now.is_equal).any():
        return np.zeros_like(of_model)
    is_large = of_model & (now.numel >= 32)
    is_one = now.is_equal & ((now.sums == 0) | ~IS_FLOAT[now.codes])
    varies = (of_model & ~is_one).any(axis=1, keepdims=True)
    return is_large & ~varies & ~(is_large & (now.sums == _IGNORED * now.numel))


def _fact(name: str, *, advice: str = "", **fields: Any) -> NumberRule:
    """A rule that is reported once in a run, by default on a count of ``monitor/loop/facts.py``,
    and warns if it has advice. ``fields``: others of the rule.
    """
    always: dict[str, Any] = {"condition": lambda number: True, "steps": 1, "warns": bool(advice)}
    return NumberRule(
        kind="invariant", names=[name], is_over=never, pause="", advice=advice, **always | fields
    )


NUMBER_INVARIANTS: tuple[NumberRule, ...] = (
    _fact(
        "not_cleared", cause="gradient",
        text="gradients are not cleared: in {value} updates in a row, backward() added to the "
        "gradients of the update before (seen at {name})",
        advice="call optimizer.zero_grad() after each update",  # TrainCheck
    ),
    _fact(
        "loaded_nothing", cause="optimizer",
        text="load_state_dict(strict=False) has loaded no parameter: none of the {value} keys that "
        "it left over is that of one ({name})",
        advice="rename the keys (without a prefix such as module. or _orig_mod.), and look at what "
        "load_state_dict() returns",
    ),
    _fact(
        "loaded_itself", cause="optimizer",
        text="load_state_dict() was given the model's own tensors {name}, all {value}, and changes "
        "nothing: state_dict() returns the tensors themselves, which updates go on changing",
        advice="keep weights as copy.deepcopy(model.state_dict())",
    ),
    _fact(
        "never_stepped", cause="optimizer",
        text="gradients were made and cleared {value} times, and no optimizer has stepped, though "
        "{name} holds weights of the model",
        advice="call optimizer.step() after backward(): without parentheses it does nothing",
    ),
    _fact(
        "cleared_early", cause="gradient",
        text="gradients were cleared between backward() and the update, in {value} updates in a "
        "row: the update had no gradient of {name}",
        advice="call zero_grad() after optimizer.step(), or before backward()",
    ),
    _fact(
        "nan_kept", cause="gradient",
        text="the gradient of {name} holds NaN, and the last {value} calls of backward() added "
        "to it without an update or a zero_grad() in between: it stays NaN",
        advice="call optimizer.zero_grad() where an update is skipped, too",  # espnet#3283
    ),
    _fact(
        "stepped_again", cause="gradient",
        text="the optimizer steps twice for one backward(), the second time with the gradients of "
        "the first: seen {value} times (at {name})",
        advice="call it once: scaler.step(optimizer) calls optimizer.step() itself",
        # IAHispano/Applio#860
    ),
    _fact(
        "clipped_late", cause="gradient",
        text="gradients were clipped after the update that used them, in {value} updates in a "
        "row: the update used unclipped gradients",
        advice="clip between backward() and optimizer.step()",
    ),
    _fact(
        "clipped_none", cause="gradient",
        text="clipping was given no gradient in {value} updates in a row, though {name} had one",
        advice="a generator of parameters is empty after its first use: pass model.parameters() "
        "in each call",
    ),
    _fact(
        "clipped_early", cause="gradient",
        text="gradients were clipped before backward(), when there were none, in {value} updates "
        "in a row: the update used unclipped gradients",
        advice="clip between backward() and optimizer.step()",  # tabm#20
    ),
    _fact(
        "wrong_limit", cause="gradient",
        text="gradients were clipped to {name}, in {value} updates in a row",
        advice="give a threshold above 0; with math.inf clip_grad_norm_() returns the norm and "
        "clips nothing",
    ),
    _fact(
        "cleared_between", cause="gradient",
        text="the gradients of {name} calls of backward() were cleared before the update, in "
        "{value} updates in a row: it used those of the last call alone",  # RAE#67
    ),
    _fact(
        "cleared_seldom", cause="gradient",
        text="gradients are cleared after {value} updates each, not after every update: updates in "
        "between have the gradients of those before in them (seen at {name})",
    ),
    _fact(
        "target_means", cause="gradient",
        text="cross entropy averages over {name} targets in the calls of backward() for one "
        "update, in {value} updates in a row: a target counts more in a call with few of them than "
        "in one with many. Each counts alike in the sum of all, divided by the number of all",
        # mlx-lm#1413
    ),
    _fact(
        "left_over", cause="gradient",
        text="the number of calls of backward() before an update is {name}, as where micro-batches "
        "that are left over at the end of an epoch go into the first update of the next",
    ),
    _fact(
        "across", cause="gradient",
        text="backward() adds to a gradient that an earlier call made before another optimizer "
        "stepped, in {value} updates in a row (seen at {name}): as where a discriminator's update "
        "has the gradients of the generator's loss in it",
    ),
    _fact(
        "doubled", cause="gradient",
        text="backward() was called twice on the same loss, and its gradients added up, in {value} "
        "updates in a row (seen at {name})",
        advice="call it once, or clear the gradients in between",
    ),
    _fact(
        "clipped_between", cause="gradient",
        text="gradients are clipped {name} for one update, and backward() adds to what was clipped"
        ", in {value} updates in a row",
    ),
    _fact(
        "clip_ratio", cause="optimizer", condition=lambda ratio: ratio.value >= _CLIPS,
        steps=_CLIP_STEPS,
        text="every update is clipped to less than a thousandth: the norm of all gradients is "
        "{value} times the threshold of {usual}",
    ),
    _fact(
        "clip_ratio", cause="optimizer", condition=lambda ratio: ratio.value <= 1 / _CLIPS,
        steps=_CLIP_STEPS,
        text="clipping changes nothing: the norm of all gradients is {value} times the threshold "
        "of {usual}",
    ),
    _fact(
        "loss_scale", cause="precision",
        condition=lambda scale: scale.is_skipped and scale.run == 0, steps=_STUCK,
        text="the loss scale stays at {value} although updates are skipped",
        advice="check that its backoff_factor is below 1 and that no step sets the scale again",
        # Micikevicius et al. (2018)
    ),
    _fact(
        "not_multiplied", cause="precision",
        text="gradients are divided by a loss scale that the loss was not multiplied by, in "
        "{value} updates in a row: backward() was called on the argument of scaler.scale(), "
        "not on its result", advice="call scaler.scale(loss).backward()",  # DeepSpeed#7837
    ),
    _fact(
        "reduced_twice", cause="gradient",
        text="between backward() and the update, gradients that DistributedDataParallel had "
        "averaged over its ranks were multiplied by {name}, in {value} updates in a row, as a "
        "second all_reduce() or a second division does",  # Megatron-LM#7452
    ),
    _fact(
        "evaluation_mode", cause="layer",
        text="the model is trained in evaluation mode, as after eval(), which changes {name}: "
        "seen {value} times in a row, ten updates apart",
        advice="call model.train() before training",
    ),
    _fact(
        "frozen_norms", cause="layer",
        text="frozen layers are in training mode and go on updating their statistics: {name}",
        # indexnet_matting#35
    ),
    _fact(
        "frozen", cause="optimizer",
        text="few of the model's weights are trained: {name}",  # PyTorch forum 84911
    ),
    _fact(
        "frozen_moves", cause="optimizer",
        text="{name} has requires_grad=False, and its optimizer goes on changing it: it has a "
        "gradient of 0, not None, with which momentum and weight decay go on",
        advice="set its .grad to None, as zero_grad() does unless given set_to_none=False, or take "
        "it out of the optimizer",
    ),
    _fact(
        "of_frozen", cause="optimizer",
        text="an optimizer steps, and none of its parameters requires a gradient ({name}){checks}: "
        "requires_grad_(False), as for the loss of another, may not have been undone",
    ),
    _fact(
        "attribute", cause="optimizer",
        text="{name} is False, which torch does not read there: an optimizer holds what it was to "
        "freeze",
        advice="call requires_grad_(False) on the module or the parameter",
    ),
    _fact(
        "unread_rate", cause="optimizer",
        text="{name} was set to {value}, where the optimizer does not read it: its learning rates "
        "are others",
        advice='set group["lr"] for each group in optimizer.param_groups',
    ),
    _fact(
        "held_twice", cause="optimizer",
        text="{value} parameters are updated by two optimizers: {name}",
    ),
    _fact(
        "untied", cause="layer",
        text="weights that should be tied are separate parameters: {name}",
        advice="call model.tie_weights() after weights were loaded, moved or replaced",
        # verl, OPT.15
    ),
    _fact(
        "repeated_layer", cause="layer",
        text="{name}, with one set of weights, as [layer] * n does: [Layer() for _ in range(n)] "
        "has a layer for each place",
    ),
    _fact(
        "scheduled_twice", cause="optimizer",
        text="a learning rate scheduler steps several times for each update of its optimizer: "
        "{name} an update, in {value} updates in a row",
    ),
    _fact(
        "idle_schedule", cause="optimizer",
        text="a learning rate scheduler steps whose optimizer does not: {name}, at {value} of its "
        "steps in a row, while another optimizer holds the same parameters",
    ),
    _fact(
        "schedule_anew", cause="optimizer",
        text="the optimizer continues at update {value} and {name} begins at 0: its state may not "
        "have been loaded",  # OPT.12
    ),
    _fact(
        "optimizer_anew", cause="optimizer",
        text="{name} continues at step {value}, and that optimizer began at update 0: its state "
        "may not have been loaded with that of the scheduler, nor its learning rate",
        # pytorch#29697
    ),
    _fact(
        "scale_anew", cause="precision",
        text="the optimizer continues at update {value} and its GradScaler begins at {name}: its "
        "state may not have been loaded",  # transformers#34053
    ),
    _fact(
        "small_factor", cause="optimizer",
        text="LambdaLR multiplies {name}. A function that returns learning rates is meant for an "
        "optimizer with a rate of 1",
    ),
    _fact(
        "moments_lost", cause="optimizer",
        text="the optimizer continues at update {value} and its whole state is 0 ({name}): its "
        "first updates may be several times larger than those before",
        advice="check whether the state was saved or loaded as zeros, and load it from a "
        "checkpoint that has it",
    ),
    _fact(
        "written", cause="optimizer",
        text="something other than its optimizer has changed {name} between updates, {value} "
        "times: weights of an average or a checkpoint may have replaced those that are trained",
        # Open-Sora-Plan#186
    ),
    _fact("fault", cause="optimizer", text="{name}", warns=True),
    _fact(
        "made_anew", cause="optimizer",
        text="an optimizer of the same parameters began without a state for the third time: {name}",
        # CodefyUI#147
    ),
    _fact(
        "rate_share", cause="optimizer", steps=_TINY_STEPS,
        condition=lambda rate: 0 < rate.value < LEAST_RATE * rate.usual,
        text="the learning rate is {value}, less than a millionth of its largest value until now, "
        "{usual}",
    ),
    _fact(
        "rate_ended", cause="optimizer",
        text="the learning rate has been less than a millionth of its largest value in {value} "
        "steps in a row, at least as many as it was larger in: hardly anything is learned any more",
        advice="look at the schedule: a scheduler that is made for epochs may be stepped for each "
        "batch, or its last step has long passed",
    ),
    _fact(
        "siblings", cause="precision",
        text="{name}",  # lightning-thunder#725
    ),
    _fact(
        "dropout_on", cause="layer",
        text="dropout is active in passes without gradients: {value} such passes in a row ran in "
        "training mode ({name})",  # transformers#33844
    ),
    _fact(
        "dropped_most", cause="layer",
        text="dropout makes most elements 0 ({name}): p is the share that it does not keep, and "
        "TensorFlow's keep_prob of 0.9 is 0.1 here",
    ),
    _fact(
        "recomputed_dropout", cause="layer",
        text="{name} drops other elements when activation checkpointing computes it again in "
        "backward(), in {value} steps in a row: gradients are those of another result than the "
        "loss", advice="call torch.utils.checkpoint.checkpoint() without preserve_rng_state=False; "
        "a checkpoint of your own has to set the state of the generators as it was",
        # guided-diffusion#167
    ),
    _fact(
        "statistics_on", cause="layer",
        text="batch norm updates its statistics in passes without gradients: {value} such passes "
        "in a row ran in training mode ({name})",  # pytorch_stacked_hourglass#44
    ),
    _fact(
        "stale_statistics", cause="layer",
        text="{name} is called in evaluation mode, and in {value} checks in a row, ten updates "
        "apart, its weight has moved and its running statistics have not, while those of a "
        "BatchNorm in training have, as where an average takes in the weights alone",
        advice="copy the buffers, too, or average them (AveragedModel(use_buffers=True))",
        # pytorch: EMA models without buffers
    ),
    _fact(
        "average", cause="optimizer",
        text="{name}, which has the shapes of weights that are trained, kept {value} of itself and "
        "took in the rest from these, in each of 3 updates that were measured: it is hardly an "
        "average",
        advice="if it is meant as one (an EMA, a target network), its decay and 1 - decay are "
        "swapped",
    ),
    _fact(
        "average_short", cause="optimizer",
        text="{name}, which has the shapes of weights that are trained, kept {value} of itself and "
        "took in the rest from these, in each of 3 updates that were measured: it averages the "
        "last few updates alone",  # diffusers#1864
    ),
    _fact(
        "average_stands", cause="precision",
        text="{name}, which has the shapes of weights that are trained, is in 16 bits and is "
        "written to at each update, and at least 9 of 10 of its elements kept every bit in each of "
        "3 updates that were measured: what an average takes in rounds away",
        advice="keep the average in float32",
    ),
    _fact(
        "mask", cause="layer",
        text="the mask of {name}",
        advice="look at how the mask is made",
    ),
    _fact(
        "norm_momentum", cause="layer",
        text="the running statistics of batch norm are no average of many batches ({name}): with a "
        "momentum of 0 they stay as they are, near 1 they are those of the last batch, and Keras's "
        "0.99 is 0.01 here",
    ),
    _fact(
        "given_twice", cause="layer",
        text="in the graph of the loss {name}{checks}",
        advice="give the criterion the logits: what that function is given",
    ),
    _fact(
        "given_probabilities", cause="layer",
        text="in the graph of the loss {name}{checks}. It "
        "expects logarithms of probabilities: log_softmax, or cross_entropy on what softmax was "
        "given",
    ),
    _fact(
        "applied_twice", cause="layer",
        text="in the graph of the loss {name}{checks}: it "
        "flattens what the first has made, whose input may be meant",  # transformers#45120
    ),
    _fact(
        "one_element", cause="layer",
        text="in the graph of the loss {name}{checks}",
        advice="check the number of outputs and the shape: binary_cross_entropy_with_logits is for "
        "one output, and a normalisation needs several elements",
    ),
    _fact(
        "other_dimension", cause="layer",
        text="in the graph of the loss {name}{checks}",
        advice="take the softmax over the dimension of the classes: dim=1 for nll_loss, dim=-1 of "
        "what ctc_loss and gather() are given",  # pytorchfundamentals#21
    ),
    _fact(
        "no_logarithm", cause="loss",
        text="in the graph of the loss {name}{checks}: it "
        "expects logarithms there",
        advice="give it log_softmax of the logits (targets of kl_div stay probabilities, unless "
        "log_target=True), or poisson_nll_loss what exp() was given, or log_input=False",
    ),
    _fact(
        "many_hot", cause="loss",
        text="in the graph of the loss cross entropy is given targets of 0 and 1 that add up to "
        "more than 1, {name}{checks}: its softmax makes them compete. For labels that do not rule "
        "each other out, as those of several samples, binary_cross_entropy_with_logits is meant",
    ),
    _fact(
        "earlier_loss", cause="loss",
        text="the graph of the loss {name}: backward() goes through all of it once more",
        advice="add losses up as numbers (loss.item()), and keep no result with its graph from one "
        "update to the next (detach() it), in place of retain_graph=True",
    ),
    _fact(
        "constant_term", cause="loss",
        text="a term of the loss has no graph, and autograd.grad() of an output with respect to an "
        "input was called with retain_graph=True, without create_graph=True{checks}: what is made "
        "of its result, such as a gradient penalty, trains nothing",
        advice="call torch.autograd.grad(..., create_graph=True)",
    ),
    _fact(
        "old_cast", cause="precision",
        text="the graph of the loss holds a cast of a weight that was in it at least ten updates "
        "before{checks}: the model computes with what the weight was then",
        advice="enter autocast() in each step, around the forward pass alone: it keeps its casts "
        "of weights until it is left",
    ),
    _fact(
        "of_itself", cause="loss",
        text="in the graph of the loss there is {name}{checks}",
        advice="compute the other of another example, or detach() it, as the log-probability of "
        "the old policy",
    ),
    _fact(
        "across_samples", cause="layer",
        text="in the graph of the loss {name}{checks}",
        advice="take the softmax of attention, or the norm of each sample, over what is added up, "
        "dim=-1: nn.Softmax() without dim, and normalize() of another than 1, take another",
    ),
    _fact(
        "moved", cause="layer",
        text="in the graph of the loss {name}{checks}: a view keeps the order of the elements, and "
        "mixes up the dimensions here",
        advice="move them with permute() or transpose(): y.permute(0, 2, 3, 1).reshape(-1, C) of "
        "a convolution, x.view(B, T, H, d).transpose(1, 2) for heads, transpose(1, 2) before these "
        "are joined, and h_n.transpose(0, 1).reshape(B, -1) for the states of a recurrent layer",
    ),
    _fact(
        "last_sample", cause="layer",
        text="of what a recurrent layer returns, of shape {name}, the last element of dimension 1 "
        "is taken{checks}, which is the last sample: without batch_first=True its dimensions are "
        "those of time and of the samples",
        advice="give nn.LSTM, nn.GRU or nn.RNN batch_first=True, or take output[-1]",
    ),
    _fact(
        "padded", cause="layer",
        text="the last place is taken of what pad_packed_sequence() returns{checks}: {name} had "
        "ended before it, and have padding there",
        advice="take h_n, the state after the last step of each sequence, or the output at its "
        "length - 1",
    ),
    _fact(
        "over_samples", cause="layer",
        text="of what attention without batch_first=True returns, of shape {name}, one element of "
        "dimension 1 is taken, or their mean{checks}, and it has attended over dimension 0: where "
        "that is the batch, samples attend to each other. batch_first=True has it second",
    ),
    _fact(
        "dropped", cause="layer",
        text="in the graph of the loss {name}{checks}: it loses logits at random, where dropout "
        "before the last layer would lose features",
    ),
    _fact(
        "narrow", cause="loss",
        text="in the graph of the loss {name}{checks}",
        advice="divide cosines by the temperature",
    ),
    _fact(
        "clamped", cause="loss",
        text="in the graph of the loss {name}{checks}: clamp() has no gradient outside of its "
        "bounds", advice="give binary_cross_entropy_with_logits what the layer returns",
    ),
    _fact(
        "sees_next", cause="data",
        text="in the graph of the loss cross entropy is given as targets what the embedding was "
        "given, one place on, and attention at each place looks at the next place, too{checks}: "
        "the model has to copy its input",
        advice="mask what comes later, with is_causal=True or -inf above the diagonal",
    ),
    _fact(
        "padding", cause="data",
        text="in the graph of the loss cross entropy counts {name} of places at which the "
        "embedding was given its padding_idx{checks}: ignore_index leaves such targets out",
    ),
    _fact(
        "wrong_targets", cause="data",
        text="in the graph of the loss {name}{checks}",
        advice="look at the targets: a binary cross entropy expects numbers from 0 to 1, the "
        "losses of a margin or an embedding 1 and -1 (2 * target - 1), and ctc_loss no blank: its "
        "labels begin at 1, or blank= is another number",
    ),
    _fact(
        "unshifted", cause="data",
        text="in the graph of the loss cross entropy is given as targets what the embedding was "
        "given, number for number, though attention or a recurrent layer reads at each place that "
        "place, too{checks}: the model has to copy its input",
        advice="shift them by one, as logits[:, :-1] and tokens[:, 1:] are, unless a function that "
        "is given both does it",
    ),
    _fact(
        "no_second", cause="layer",
        text="autograd.grad() of a derivative with respect to an input has returned 0 in every "
        "element{checks}: it leads through ReLU, whose second derivative is 0",
        advice="use an activation that is curved, as tanh, sin or SiLU, where the loss has second "
        "derivatives",
    ),
    _fact(
        "alike", cause="loss",
        text="the loss consists of cosine similarities whose sides both have a gradient{checks}: "
        "it is least where all results are the same, whatever the input, and nothing keeps them "
        "apart",
        advice="stop the gradient at one side of each with detach(), as SimSiam and BYOL do, or "
        "add a term for pairs that should differ",
    ),
    _fact(
        "made_in_forward", cause="layer",
        text="{name} in the graph of the loss were made anew{checks}, and neither an installed "
        "model nor an optimizer that has stepped holds them: they are not trained",
        advice="make layers in __init__(): one that forward() makes has other random weights in "
        "each call",
    ),
    _fact(
        "first_loss", cause="layer",
        text="the first loss is {value}, and guessing among the {name} classes of its cross "
        "entropy has {usual}: logits are large at first, as where the last layer has the weight of "
        "an embedding, which nn.Embedding draws from N(0, 1)",  # nanoGPT: initial weights
    ),
    _fact(
        "negative", cause="loss",
        text="the loss is {value}, and it is {name}",
        advice="check what the criterion is given: such a loss has no least value",
    ),
    _fact(
        "broadcast", cause="loss",
        text="in the graph of the loss {name} is averaged or added up{checks}",
        advice="if each result has one target, or one weight, give both the same shape, as "
        "target.view_as(prediction) has",  # pytorch#16045
    ),
    _fact(
        "focal_mean", cause="loss",
        text="in the graph of the loss {name}, to a power, multiplies that loss, which was "
        "averaged before{checks}: it is one factor for all, where a focal loss has one for each "
        "example (reduction=\"none\", and the mean after the product)",
        # Kaggle's library of losses: FocalLoss
    ),
    _fact(
        "contrastive", cause="loss",
        text="in the graph of the loss {name}{checks}",
        advice="give cross entropy each positive once, at its target: z1 @ z2.T with "
        "torch.arange(N), or z @ z.T with -inf on its diagonal",
    ),
    _fact(
        "variational", cause="loss",
        text="in the graph of the loss the divergence of N(mean, variance) from N(0, 1) {name}"
        "{checks}",
        advice="add -0.5 * (1 + logvar - mean**2 - logvar.exp()) to the loss, and draw "
        "mean + (0.5 * logvar).exp() * torch.randn_like(mean), or with rsample()",
    ),
    _fact(
        "advantage", cause="loss",
        text="in the graph of the loss {name} is multiplied by an advantage that has a gradient, "
        "and whose value has a loss of its own{checks}: the policy's loss trains the value, too, "
        "to be as its action was likely",
        advice="detach() the advantage where it weighs the policy's loss",
    ),
    _fact(
        "trained_target", cause="loss",
        text="in the graph of the loss the value of an action, which gather() took, has a target "
        "with a gradient, which holds the {name} of others, and an optimizer trains both{checks}: "
        "the target moves to the value, too. Q-learning computes it under no_grad(); residual "
        "gradients lead through both",
    ),
    _fact(
        "trained_reference", cause="loss",
        text="in the graph of the loss log-probabilities of {name} are compared, and optimizers "
        "train both{checks}: a reference, as DPO has, stays as it was, computed under no_grad()",
    ),
    _fact(
        "nothing_preferred", cause="loss",
        text="in the graph of the loss logsigmoid is given 0 in all {name} after ten updates and "
        "more{checks}, as where the reference policy is the policy itself",
        advice="keep the reference as it was, with copy.deepcopy(model).requires_grad_(False) "
        "before training",
    ),
    _fact(
        "one_class", cause="data",
        text="in the graph of the loss cross entropy, the only loss, is given one class alone: "
        "{name}{checks}. Unless nearly all data are of it, they are sorted by class and not "
        "shuffled, or the conversion of labels to integers has cut them off",
    ),
    _fact(
        "given_targets", cause="data",
        text="the targets of the loss are {name} of what a layer is given, number for number"
        "{checks}: the model can read them there, unless that is what it is to learn",
    ),
    _fact(
        "inert_term", cause="loss",
        text="a term of the loss has no graph, and its value has changed{checks}: it trains "
        "nothing, as a penalty that is made of .data, .item(), detach(), a comparison or counts",
    ),
    _fact(
        "same_dropout", cause="data",
        text="dropout ({name}) drops the same elements{checks}: the generator of random numbers is "
        "set to the same state in each step",
        advice="call torch.manual_seed() once, before training",
    ),
    _fact(
        "turned", cause="loss",
        text="the loss is a cross entropy times a number below 0{checks}: updates make the targets "
        "less likely. Forgetting on purpose does that",
    ),
    _fact(
        "entropy", cause="loss",
        text="the loss adds the entropy of probabilities to that of a policy{checks}: updates make "
        "it smaller, and what is drawn less random. A bonus for exploration is subtracted",
    ),
    _fact(
        "unregistered", cause="optimizer",
        text="{name} gradients that nothing uses{checks}: parameters() has no weights of what "
        "a list, a tuple or a dictionary holds, and no optimizer that has stepped has them",
        advice="use nn.ModuleList or nn.ModuleDict, and make the optimizer after that; freeze what "
        "is not to be trained with requires_grad_(False)",
    ),
    _fact(
        "no_parameter", cause="optimizer",
        text="{name} gradients that nothing uses{checks}: a tensor with requires_grad that is "
        "no nn.Parameter is not among parameters(), and no optimizer that has stepped has it",
        advice="if it is to be trained, make it an nn.Parameter (of an nn.ParameterList in a list) "
        "before the optimizer is made",
    ),
    _fact(
        "left_out", cause="optimizer",
        text="{name} gradients that nothing uses{checks}: no model that install() was given has "
        "registered it, and no optimizer that has stepped has it. What is to be trained, as the "
        "centers of a criterion, an optimizer has to be given",
    ),
    _fact(
        "one_number", cause="layer",
        text="every element of {name} was {value} in the first observed step: the units of such a "
        "layer may compute the same, and get equal gradients",
    ),
    _fact(
        "stored_images", cause="data",
        text="the batch has whole numbers from 0 to {value}, as images are stored, and {name} is "
        "given them as they are, though no norm follows it: initial weights are made for inputs of "
        "about 1",
    ),
    _fact(
        "same_batch", cause="data",
        text="the first {value} observed steps trained on the same batch, bit for bit",
    ),
    _fact(
        "repeated_batch", cause="data",
        text="each batch comes {value} times in a row, bit for bit, as the last {usual} did",
        # TrainCheck
    ),
    _fact(
        "cycle", cause="data",
        text="the batches repeat every {value} observed steps in the same order, bit for bit: "
        "they are not shuffled",
    ),
    _fact(
        "one_batch", cause="data",
        text="{name} trained on the same batch, bit for bit, in each of {value} steps",
        advice="give each rank batches of its own (DistributedSampler, another seed), unless each "
        "computes another part of the batch",
    ),
)  # fmt: skip

TENSOR_INVARIANTS: tuple[TensorRule, ...] = (
    TensorRule(
        kind="invariant", condition=stands_still(True), steps=1, is_over=_once, pause="",
        value=lambda view: view.standing, cause="optimizer",
        text="no bit of it has changed in {value} updates in a row, though it moved before and its "
        "gradient and the learning rate are at least half as large as they were then",
        advice="check that the optimizer still holds this tensor and that nothing restores it",
        # TrainCheck
    ),
    TensorRule(
        kind="invariant", condition=stands_still(False), steps=1, is_over=_once, pause="",
        value=lambda view: view.standing, cause="precision", warns=False,
        text="no bit of it has changed in {value} updates in a row, though it moved before: "
        "updates may be smaller than the spacing of {dtype}",
    ),
    TensorRule(
        kind="invariant", condition=counter_will_stop, steps=8, is_over=_once, pause="",
        value=lambda view: view.now.abs_max, cause="precision",
        usual=lambda view: _WHOLE[view.now.codes],
        text="it counts in {dtype} and has reached {value}: from {usual} on, adding 1 changes "
        "nothing", advice="keep it in float32 or in an integer dtype",  # DeepSpeed, NUM.08
    ),
    TensorRule(
        kind="invariant", condition=position_is_rounded, steps=3, is_over=_once, pause="",
        value=lambda view: view.now.abs_max, cause="precision", warns=False,
        text="whole numbers up to {value} in {dtype}, which can't represent all of them",
    ),
    TensorRule(
        kind="invariant", condition=labels_are_ignored, steps=3, is_over=_once, pause="",
        value=lambda view: view.now.sums / view.now.numel, cause="data",
        text="every label is {value}, which cross entropy ignores, in 3 steps in a row",
        advice="check how labels are masked",
    ),
    TensorRule(
        kind="invariant", condition=input_is_constant, steps=10, is_over=_once, pause="",
        value=lambda view: view.now.sums / view.now.numel, cause="data",
        text="all its elements are {value} in 10 steps in a row, and no other input of the model "
        "varies", advice="check what the data loader returns",
    ),
)  # fmt: skip

#: All rules, those of the watch included.
NUMBER_RULES = (*rules.NUMBER_RULES, *NUMBER_INVARIANTS)
TENSOR_RULES = (*rules.TENSOR_RULES, *TENSOR_INVARIANTS)
