"""The advice of a stop report fits the case."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.record.event import (
    CHANGED_BY_LOOP,
    MAYBE_CHANGED,
    NOT_STEPPED,
    NOT_UPDATED,
    WHEN_LAST_READ,
)
from fastcheck.record.format import Verdict
from fastcheck.report.advice.choose import advise
from fastcheck.report.render import render
from fastcheck.report.stop_report import MadeBy
from support.operator_reports import WEIGHT, ZERO, advice_of, of, operator_report, said
from support.records import record_builder as build
from support.reports import all_reports, full_report, text_of


def test_float16_that_outgrew_its_range_gets_bfloat16_first() -> None:
    items = advise(full_report())
    assert "float16 ends at 65,504" in items[0].text
    assert "27,950 (43 % of it) at step 40" in items[0].text
    assert "bfloat16" in items[0].text and "model.to(torch.bfloat16)" in items[0].code
    assert "keep only module layers.3.attn in float32" in items[0].text
    assert "Stop the growth" in items[1].text


def test_a_class_of_attention_that_overflows_scales_before_the_product() -> None:
    """The path alone says nothing: a LoRA of an attention's projection takes no softmax."""
    product = "(q / d**0.5) @ k.transpose(-2, -1)"
    assert product in advice_of(build.report(build.site("layers.3", "LlamaAttention")))
    projection = build.site("layers.3.self_attn.o_proj", "LoraLinear")
    assert product not in advice_of(build.report(projection))
    what = build.record("float32", nan_count=3, step=41)
    assert "softmax" not in advice_of(build.report(projection, what))


def test_growth_advice_says_how_much_and_how_to_clip() -> None:
    where = build.site("mlp", "MLP")
    report = build.report(where, before=build.grown("float16", 900.0, 1.2, 20, 40))
    told = advice_of(report)
    assert re.search(r"Stop the growth \(\d+ times", told) and "clip_grad_norm_" in told
    assert "p -= lr * p.grad" in told  # no optimizer is known
    assert "p.grad" not in advice_of(replace(report, learning_rates=(("SGD", 0.1),)))


def test_a_jump_after_steady_steps_points_at_the_batch() -> None:
    before = build.grown("float16", 20.0, 1.0, 8, 40)
    told = advice_of(build.report(build.site("mlp", "MLP"), before=before))
    assert "this step's batch" in told and "Stop the growth" not in told


def test_an_input_that_is_nearly_out_of_range_points_upstream() -> None:
    inputs = ((build.site("layers.2", "Block"), build.record("float16", high=61200.0)),)
    told = advice_of(build.report(build.site("mlp", "MLP"), inputs=inputs))
    assert "from layers.2, already reaches 61,200, 93 % of float16" in told


def test_float16_activation_overflow_says_that_loss_scaling_does_not_help() -> None:
    told = advice_of(build.report(build.site("mlp", "MLP"), scale=1024.0))
    assert "Loss scaling can't help" in told
    assert "Loss scaling" not in advice_of(build.report(build.site("mlp", "MLP")))


def test_inf_in_float32_is_divergence_not_a_small_format() -> None:
    what = build.record("float32", posinf_count=3, step=41)
    grown = build.report(build.site("mlp", "MLP"), what, before=build.grown("float32", 1, 5, 9, 40))
    assert "diverges" in advice_of(grown) and "model.to(torch.bfloat16)" not in advice_of(grown)
    steady = build.report(
        build.site("mlp", "MLP"), what, before=build.grown("float32", 1, 1, 9, 40)
    )
    assert "division by zero" in advice_of(steady) and "diverges" not in advice_of(steady)


def test_nan_from_finite_inputs_depends_on_what_the_inputs_hold() -> None:
    what = build.record("float32", nan_count=3, step=41)
    where = build.site("head", "Head")
    source = build.site("", "Net", role="input", label="input[0]")
    negative = build.record(negative_count=7, low=-2.5)
    told = advice_of(build.report(where, what, inputs=((source, negative),)))
    assert "input[0] holds 7 negative numbers (down to -2.5)" in told and "sqrt" in told
    zeros = build.record(zero_count=7, low=0.0)
    told = advice_of(build.report(where, what, inputs=((source, zeros),)))
    assert "input[0] holds 7 zeros of 1,000" in told and "0/0" in told
    plain = advice_of(build.report(where, what, inputs=((source, build.record(low=0.1)),)))
    assert "the module itself made it" in plain and "negative numbers (" not in plain
    assert "collective" not in plain


def test_a_collective_may_have_brought_what_a_module_returns_on_several_ranks() -> None:
    what = build.record("float32", nan_count=3, step=41)
    where = build.site("head", "Head")
    source = build.site("", "Net", role="input", label="input[0]")
    report = build.report(where, what, inputs=((source, build.record(low=0.1)),))
    several = replace(report, world_size=2)
    assert "or a collective that it calls has brought it from another rank" in advice_of(several)
    assert "it began here, as far as this rank has read" in render(several, 200)
    op = replace(report.culprit, site=replace(where, op="aten.div"))
    for other in (report, replace(several, culprit=op)):
        assert "as far as this rank" not in render(other, 200)


def test_a_negative_number_is_no_news_where_no_earlier_record_is_held() -> None:
    what = build.record("float32", nan_count=3, step=0)
    source = build.site("", "Net", role="input", label="input[0]")
    read = ((source, build.record(negative_count=7, low=-2.5)),)
    items = advise(build.report(build.site("head", "Head"), what, inputs=read))
    assert "the module itself made it" in items[0].text and "negative numbers (" in items[1].text


def test_a_gradient_that_the_loop_has_changed() -> None:
    where = build.site("fc", "Linear", direction="backward", role="param_grad", label="weight")
    report = build.report(where, build.record("float32", nan_count=3, step=41))
    reason = f"{CHANGED_BY_LOOP}: what has changed it since made it so"
    report = replace(report, culprit=replace(report.culprit, reason=reason))
    assert "Look between backward() and the update" in advise(report)[0].text
    assert "The backward of sqrt" not in advice_of(report)


def test_a_gradient_that_was_read_after_the_loop_had_changed_gradients() -> None:
    where = build.site("fc", "Linear", direction="backward", role="param_grad", label="weight")
    report = build.report(
        where, build.record(posinf_count=3, step=41), reason=f"finite until then; {MAYBE_CHANGED}"
    )
    assert "Look between backward() and the update" in advise(report)[0].text
    assert "look for 1/x, rsqrt or log" in advise(report)[1].text


def test_a_known_operator_between_modules_is_no_division() -> None:
    where = build.site("norm", "LayerNorm", role="input", label="input[0]")
    made = MadeBy("aten.bmm", "made it", inputs=(("self", of(high=1291.0, dtype="float16")),))
    what = build.record("float16", posinf_count=3, high=64000.0, step=41)
    told = advice_of(build.report(where, what, made_by=made))
    assert "keep only the code before module norm in float32" in told
    assert "division" not in told and "A norm squares its input" not in told


def test_a_weight_that_something_else_than_torch_wrote() -> None:
    where = build.site("fc", "Linear", op="aten.addmm", role="input", label="mat2")
    what = build.record(posinf_count=3, step=41)
    told = advise(build.report(where, what, Verdict.ARRIVED, broken_weights=("fc.weight",)))
    assert "No update has made fc.weight non-finite: look at what writes weights" in told[0].text
    assert "as a batch does" not in told[0].text
    followed = build.report(
        where, what, Verdict.ARRIVED, broken_weights=("fc.weight",), updated_since=(41,)
    )
    assert "as a batch does" in advise(followed)[0].text


def test_nan_out_of_attention_suspects_a_masked_row_first() -> None:
    what = build.record("float32", nan_count=3, step=41)
    first = advise(build.report(build.site("a", "MultiheadAttention"), what))[0]
    assert "row that is masked whole" in first.text and "finfo" in first.code


def test_only_negative_infinity_is_a_mask_or_a_log() -> None:
    what = build.record("float32", neginf_count=3, step=41)
    told = advice_of(build.report(build.site("head", "Head"), what))
    assert "log of zero" in told and "mask" in told


def test_negative_infinity_at_the_end_of_the_format_is_an_overflow() -> None:
    what = build.record("float16", neginf_count=1, low=-64576.0, high=37632.0, step=41)
    before = build.grown("float16", 10.0, 1.5, 22, 40)
    first = advise(build.report(build.site("4", "Block"), what, before=before))[0]
    assert "float16 ends at 65,504" in first.text and "bfloat16" in first.text
    wide = build.record("float32", neginf_count=1, low=-3e38, high=1e38, step=41)
    before = build.grown("float32", 1e3, 50.0, 20, 40)
    assert "diverges" in advice_of(build.report(build.site("4", "Block"), wide, before=before))


def test_a_batch_that_was_cast_out_of_range() -> None:
    """A cast makes no NaN: where there is one it is not the first thing to look for."""
    where = build.site("", "Net", role="input", label="input[0]")
    for counts, place in (({"posinf_count": 1}, 0), ({"nan_count": 1}, 2)):
        what = build.record("float16", step=41, **counts)
        items = advise(build.report(where, what, Verdict.ARRIVED))
        assert "A cast to float16 turns anything above 65,504 into Inf" in items[place].text


def test_a_bad_batch_points_at_the_data() -> None:
    where = build.site("", "Net", role="input", label="input[0]")
    what = build.record(nan_count=1, step=41)
    report = build.report(where, what, Verdict.ARRIVED)
    assert "look at the data, not at the model" in advise(report)[0].text
    assert "in input[0], the batch given to Net (the model)" in text_of(report)


def test_an_unobserved_producer_names_the_options_that_hide_it() -> None:
    where = build.site("layers.3", "Block", role="input", label="input[0]")
    what = build.record(nan_count=1, step=41)
    told = advice_of(build.report(where, what, Verdict.ARRIVED, left_out_by=("exclude", "every")))
    assert "exclude= and every=" in told and "include=" not in told
    told = advice_of(build.report(where, what, Verdict.ARRIVED))
    assert "=" not in told.replace("overflow_nums=-1", "")


def test_zeros_of_labels_are_no_divisors() -> None:
    where = build.site("head", "Head")
    what = build.record("float32", nan_count=2, step=41)
    labels = (
        build.site("", "Net", role="input", label="labels"),
        build.record("int64", zero_count=9),
    )
    assert "zeros" not in advice_of(build.report(where, what, inputs=(labels,)))
    floats = (labels[0], build.record("float32", zero_count=9))
    assert "labels holds 9 zeros" in advice_of(build.report(where, what, inputs=(floats,)))


def test_a_weight_that_an_update_blew_up_is_named_with_the_learning_rate() -> None:
    weight = build.site("fc", "Linear", direction="optimizer", role="param", label="weight")
    now, before = build.record(step=9, high=3e20), build.record(step=8, low=-0.5, high=0.5)
    rates = (("SGD", 10.0), ("AdamW", 1e-4))
    report = build.report(
        build.site("fc", "Linear"),
        build.record(posinf_count=3, step=9),
        inputs=((weight, now),),
        inputs_before=(before,),
        learning_rates=rates,
    )
    first = advise(report)[0].text
    assert "An update, or a write by the program, since step 8 took the largest" in first
    assert "number of fc.weight from 0.5 to 3.00e+20" in first
    assert "SGD: 10, AdamW: 1.00e-04" in first
    told = advice_of(report)
    assert "1/0" not in told and "division" not in told and "softmax" not in told
    average = advise(replace(report, not_updated=("fc.weight",)))
    assert "The program wrote fc.weight, which no optimizer holds" in average[0].text
    assert not any("learning rate" in item.text or "gradients" in item.text for item in average)
    healthy = replace(report, inputs_before=(build.record(step=8, high=2e20),))
    assert "took the largest number" not in advice_of(healthy)


@pytest.mark.parametrize("zeros", [3, 0])
def test_what_divides_by_0_stands_before_a_weight_that_has_changed(zeros: int) -> None:
    """An update may be why it is 0, which alone is no overflow."""
    weight = build.site("fc", "Linear", direction="optimizer", role="param", label="weight")
    divisor = (
        build.site("fc", "Linear", op="aten.sum", label="other"),
        build.record(step=9, zero_count=zeros),
    )
    report = build.report(
        build.site("fc", "Linear", op="aten.div"),
        build.record(nan_count=3, step=9),
        inputs=((weight, build.record(step=9, high=50.0)), divisor),
        inputs_before=(build.record(step=8, low=-0.5, high=0.5), None),
    )
    items = [item.text for item in advise(report)]
    changed = next(n for n, text in enumerate(items) if "took the largest number" in text)
    assert changed == bool(zeros) and ("divisor" in items[0]) is bool(zeros)


def test_op_level_is_offered_where_a_module_is_blamed() -> None:
    module = build.report(build.site("fc", "Linear"), build.record(nan_count=1))
    assert 'level="op"' in advice_of(module) and "replay=True" in advice_of(module)
    op = build.report(build.site("fc", "Linear", op="aten.div"), build.record(nan_count=1))
    assert 'level="op"' not in advice_of(op)
    batch = build.report(
        build.site("", "Net", role="input", label="input[0]"),
        build.record(nan_count=1),
        Verdict.ARRIVED,
    )
    assert 'level="op"' not in advice_of(batch)


@pytest.mark.parametrize("role", ["param", "buffer"])
def test_op_level_is_offered_for_what_the_run_has_broken(role: str) -> None:
    where = build.site("fc", "Linear", direction="optimizer", role=role, label="weight")
    bad = build.record(nan_count=1, step=5)
    broken = build.report(where, bad, Verdict.ARRIVED, before=[build.record(step=4)])
    assert 'level="op"' in advice_of(broken) and "replay=True" not in advice_of(broken)
    loaded = build.report(where, build.record(nan_count=1, step=0), Verdict.ARRIVED)
    assert 'level="op"' not in advice_of(loaded)


def test_a_parameter_is_a_checkpoint_at_first_and_an_update_later() -> None:
    where = build.site("fc", "Linear", direction="optimizer", role="param", label="weight")
    loaded = build.report(where, build.record(nan_count=1, step=0), Verdict.ARRIVED)
    assert "check the checkpoint" in advice_of(loaded)
    later = build.report(
        where,
        build.record(nan_count=1, step=9),
        Verdict.ARRIVED,
        build.grown("float32", 1.0, 1.1, 8, 8),
    )
    assert "The update before this step or a later write broke fc.weight" in advice_of(later)
    assert "check the checkpoint" not in advice_of(later)


def test_gradients_under_loss_scaling_talk_about_the_scale() -> None:
    where = build.site("fc", "Linear", direction="backward", role="grad_input", label="input[0]")
    what = build.record("float16", posinf_count=2, step=5)
    assert "loss scale (65,536)" in advice_of(build.report(where, what, scale=65536.0))
    low = advice_of(build.report(where, what, scale=0.25))
    assert "already fallen to 0.25" in low
    only_nan = build.record("float16", nan_count=2, step=5)
    assert "won't help" in advice_of(build.report(where, only_nan, scale=8.0))
    unscaled = advice_of(build.report(where, what))
    assert "torch.amp.GradScaler" in unscaled and "loss scale (" not in unscaled


def test_loss_and_float8_and_propagated() -> None:
    loss = build.site("", "CrossEntropyLoss", role="loss", label="loss")
    told = advice_of(build.report(loss, build.record(nan_count=1, numel=1, step=5)))
    assert "ignore_index" in told
    small = build.record("float8_e4m3fn", nan_count=2, high=448.0, step=5)
    assert "float8_e4m3fn ends at 448" in advice_of(build.report(build.site("fc", "Linear"), small))
    carried = build.report(build.site(), build.record(nan_count=1, step=5), Verdict.PROPAGATED)
    assert "only carries on" in advise(carried)[0].text


def test_the_last_advice_is_how_to_go_on() -> None:
    for report in all_reports()[:40]:
        assert "overflow_nums=-1" in advise(report)[-1].text


def test_a_learning_rate_that_blew_up_the_loss_comes_before_guesses(
    tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    fastcheck.install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    assert caught.value.culprit.site.role == "loss"
    advice = " ".join(str(caught.value).partition("\ntry ")[2].split())
    assert advice.startswith("1. An update, or a write") and QUOTED in advice
    assert "0/0" not in advice


RATES = (("SGD", 50.0),)
QUOTED = "lower the learning rate (it is now SGD: 50)"


@pytest.mark.parametrize(
    ("site", "what", "before"),
    [
        (build.site("fc", "Linear"), build.record(posinf_count=3, step=9), 1e3),
        (build.site("fc", "Linear"), build.record(posinf_count=3, step=9), 1.0),
        (build.site("fc", "Linear"), build.record("float16", posinf_count=3, step=9), 1e3),
        (WEIGHT, build.record(posinf_count=3, step=9), 1e3),
        (
            build.site("bn", "BatchNorm1d", role="buffer", label="running_var"),
            build.record(posinf_count=3, step=9),
            1e3,
        ),
        (
            build.site("", "SGD", direction="optimizer", role="grad_norm", label="norm"),
            build.record(posinf_count=1, step=9),
            1e3,
        ),
        (
            build.site("", "SGD", direction="optimizer", role="optimizer_state", label="exp_avg"),
            build.record(posinf_count=1, step=9),
            1e3,
        ),
    ],
    ids=lambda value: str(getattr(value, "role", "")) or "",
)
def test_wherever_a_lower_learning_rate_is_advised_it_is_quoted(
    site: fastcheck.types.Site, what: Any, before: float
) -> None:
    dtype = "float16" if int(what["dtype"]) == int(build.record("float16")["dtype"]) else "float32"
    grown = build.grown(dtype, 1e-3, before, 5, 8)
    report = build.report(site, what, Verdict.ORIGIN, grown, learning_rates=RATES)
    assert (QUOTED in advice_of(report)) == (before != 1.0 or "lower" in advice_of(report))
    assert "(it is now" not in advice_of(replace(report, learning_rates=()))


def test_a_factor_is_no_row_of_digits() -> None:
    report = build.report(
        build.site("fc", "Linear"),
        build.record(posinf_count=3, step=9),
        before=build.grown("float32", 1.0, 1e7, 6, 8),
    )
    assert "Stop the growth (1.00e+35 times in 5 steps)" in advice_of(report)


def test_growth_within_a_step_is_not_over_steps() -> None:
    before = [build.record(low=1.0, high=10.0**power, step=3) for power in (1, 6, 12)]
    what = build.record(posinf_count=3, step=3)
    report = build.report(build.site("fc", "Linear"), what, before=before)
    assert "Stop the growth (1.00e+11 times within a step)" in advice_of(report)


def test_no_layer_is_put_before_a_loss_that_grew() -> None:
    before, what = build.grown("float32", 1.0, 1e7, 6, 8), build.record(posinf_count=1, step=9)
    loss = build.site("", "", role="loss", label="the loss")
    told = advice_of(build.report(loss, what, before=before))
    assert "standardise inputs and targets" in told and "LayerNorm" not in told
    layer = advice_of(build.report(build.site("fc", "Linear"), what, before=before))
    assert "LayerNorm or RMSNorm before this module" in layer and "standardise" not in layer


def test_what_exploded_is_no_derivative_at_zero() -> None:
    where = build.site("1", "LayerNorm", direction="backward", role="grad_input", label="input[0]")
    what = build.record(nan_count=5, posinf_count=2, step=9)
    exploded = build.report(where, what, before=build.grown("float32", 1.0, 1e3, 6, 8))
    assert "Stop the growth" in advise(exploded)[0].text
    assert "is Inf at 0" not in advice_of(exploded)
    steady = build.report(where, what, before=build.grown("float32", 1.0, 1.0, 6, 8))
    assert "is Inf at 0" in advice_of(steady)


@pytest.mark.parametrize(
    "where",
    [
        build.site("norm2", "LayerNorm"),
        build.site("norm2", "LayerNorm", op="aten.native_layer_norm"),
    ],
    ids=["module", "op"],
)
def test_squares_that_overflow_are_no_logarithm(where: fastcheck.types.Site) -> None:
    source = build.site("linear2", "Linear")
    large = build.record(low=-3e26, high=1e20, negative_count=94)
    told = advice_of(build.report(where, build.record(nan_count=8), inputs=((source, large),)))
    assert "The input reaches 3.00e+26; its square" in told
    assert "log, sqrt" not in told and "eps" not in told


@pytest.mark.parametrize(
    ("where", "guesses"),
    [
        (build.site("fc", "Linear"), False),
        (build.site("c", "Conv2d"), False),
        (build.site("fc", "Net", op="aten.addmm"), False),
        (build.site("fc", "Net", op="aten.convolution"), False),
        (build.site("fc", "Net"), True),
        (build.site("fc", "Net", op="aten.log"), True),
        (build.site("fc", "Net", op="aten.div.Tensor"), True),
    ],
    ids=lambda value: f"{value.module_type}-{value.op}" if not isinstance(value, bool) else "",
)
@pytest.mark.parametrize("kind", ["nan", "posinf"])
def test_a_sum_of_products_divides_by_nothing(
    where: fastcheck.types.Site, guesses: bool, kind: str
) -> None:
    """Nor takes it a logarithm: what is in its inputs and weights is named instead."""
    source = build.site("relu", "ReLU")
    inputs = (
        (source, build.record(zero_count=7, negative_count=2, high=2.0)),
        (WEIGHT, build.record(high=3e36)),
    )
    what = build.record(step=9, **{f"{kind}_count": 3})
    told = advice_of(build.report(where, what, inputs=inputs))
    assert ("holds 7 zeros" in told) == guesses
    is_explained = where.op is not None and kind == "posinf"  # by the numbers that it read
    assert ("division" in told or "log, sqrt" in told) == (guesses and not is_explained)
    assert ("made Inf of numbers up to" in told) == (guesses and is_explained)
    assert ("divides by nothing" in told) != guesses
    assert ("fc.weight reaches 3.00e+36" in told) != guesses


def test_a_class_of_a_library_may_do_more_than_its_name_says() -> None:
    """What a Linear of torch multiplies can't leave the format here, or there is no weight."""
    where, what = build.site("fc", "Linear"), build.record(step=9, nan_count=3)
    read = (build.site("relu", "ReLU"), build.record(high=2.0))
    for inputs in ((read,), (read, (WEIGHT, build.record(high=3.0)))):
        told = advice_of(build.report(where, what, inputs=inputs))
        assert "divides by nothing" not in told and "the module itself made it" in told


@pytest.mark.usefixtures("op_observer")
@pytest.mark.parametrize("rate", [1e-3, 1e25])
def test_a_weight_that_an_update_has_written_is_told_at_op_level(rate: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    stops = pytest.raises(fastcheck.OverflowDetected)
    with fastcheck.install(model, level="op"), stops as stop:
        for n in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8) * (1 if n < 2 else 1e38)).square().mean().backward()
            optimizer.step()
    told = said(stop.value)
    wanted = "was written by an update and reaches .* learning rate .it is now SGD: 1.00e.25."
    assert (re.search(wanted, told) is not None) is (rate == 1e25)


@pytest.mark.usefixtures("op_observer")
def test_a_weight_that_no_update_has_written_is_not_told_of_one() -> None:
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, 3e38)
    stops = pytest.raises(fastcheck.OverflowDetected)
    with fastcheck.install(model, level="op"), stops as stop:
        model(torch.ones(2, 4)).sum().backward()
    told = said(stop.value)
    assert "(parameter weight)" in told and "written by an update" not in told


def test_op_level_is_not_offered_at_op_level() -> None:
    """Of a buffer that its module has written no operator is known."""
    site = build.site("bn", "BatchNorm2d", role="buffer", label="running_mean")
    report = build.report(site, build.record(nan_count=1, step=9), is_op_level=True)
    assert "run again" not in advice_of(report)
    assert "run again" in advice_of(replace(report, is_op_level=False))


class MeanOverNothing(torch.nn.Module):
    """0 / 0, of numbers without a zero."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x.exp(), labels, ignore_index=0)


@pytest.mark.usefixtures("op_observer")
@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_class_labels_are_no_divisors_in_a_run(level: str, dtype: torch.dtype) -> None:
    model, criterion = torch.nn.Linear(8, 4), MeanOverNothing()
    labels = torch.zeros(6, dtype=dtype)
    monitor = fastcheck.install(model, criterion, level=level)
    with monitor, pytest.raises(fastcheck.OverflowDetected) as caught:
        criterion(model(torch.randn(6, 8)), labels).backward()
    told = advice_of(caught.value.report)
    assert "holds 6 zeros" not in told and "labels holds" not in told


@pytest.mark.parametrize("reason", [f"it was finite; {NOT_UPDATED}", f"it was, and {NOT_STEPPED}"])
def test_a_parameter_that_no_optimizer_wrote_was_written_by_the_program(reason: str) -> None:
    where = build.site("fc", "Linear", direction="optimizer", role="param", label="weight")
    before = build.grown("float32", 1.0, 1.1, 8, 8)
    report = build.report(where, build.record(nan_count=1, step=9), Verdict.ARRIVED, before)
    culprit = replace(report.culprit, reason=reason)
    told = advice_of(replace(report, culprit=culprit))
    assert "The program wrote fc.weight" in told and "learning rate" not in told


def test_an_update_by_hand_that_diverges_is_a_learning_rate() -> None:
    where = build.site("fc", "Linear", direction="optimizer", role="param", label="weight")
    before = build.grown("float32", 1.0, 1e6, 6, 8)
    report = build.report(where, build.record(posinf_count=1, step=9), Verdict.ARRIVED, before)
    culprit = replace(report.culprit, reason=f"it was, and {NOT_STEPPED}")
    assert "lower the learning rate" in advice_of(replace(report, culprit=culprit))


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ({"nan_count": 1}, "x.var(0, correction=0)  # or: if len(x) > 1"),
        ({"posinf_count": 1}, ""),
    ],
)
def test_a_running_variance_that_became_bad_is_reset(counts: dict[str, int], code: str) -> None:
    where = build.site("bn", "BatchNorm1d", role="buffer", label="running_var")
    steady = build.grown("float32", 1.0, 1.0, 8, 8)
    items = advise(build.report(where, build.record(step=9, **counts), Verdict.ORIGIN, steady))
    assert [item.code for item in items if item.code] == ([code] if code else [])
    assert any("(BatchNorm: module.reset_running_stats())" in item.text for item in items)
    assert ("read a number above 1.84e+19, whose square" in items[0].text) is (
        "posinf_count" in counts
    )


def test_a_buffer_that_never_was_finite_is_its_initialisation() -> None:
    where = build.site("rope", "Rotary", direction="optimizer", role="buffer", label="cos")
    told = advice_of(build.report(where, build.record(nan_count=1, step=0), Verdict.ARRIVED))
    assert "look at the checkpoint, and at the code that makes it" in told
    assert "earlier batches" not in told


def test_an_operator_from_the_graph_of_the_loss_is_as_good() -> None:
    loss = build.site("", "", role="loss", label="loss")
    made = MadeBy("DivBackward0", "found", inputs=(("self", ZERO), ("other", ZERO)))
    report = build.report(loss, build.record(numel=1, nan_count=1, step=5), made_by=made)
    assert "The divisor other is 0 in 2 of 8 elements" in advise(report)[0].text
    assert "To find the line, run again" in advice_of(report)
    assert "run again" not in advice_of(replace(report, made_by=replace(made, line="a.py:1")))
    nans = build.record(numel=8, nan_count=2, step=5)
    product = MadeBy("MulBackward0", "found", inputs=(("self", ZERO),), result=nans)
    text = advise(build.report(loss, nans, made_by=product))[0].text
    assert "self is 0 in 2 of 8 elements, and as many elements are NaN: the other factor" in text
    assert "may be Inf there" in text
    outside = MadeBy("", "found", variable="w, assigned at a.py:3 in step: w = a / a.sum()")
    grown = np.stack([build.record(numel=1, high=10.0**n, step=n) for n in range(5)])
    report = replace(report, trend=np.append(grown, report.culprit.record))
    assert "it divides, and 0/0 is NaN" in advise(replace(report, made_by=outside))[0].text
    assert "Stop the growth" in advice_of(report)


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("w, assigned at a.py:3 in step", "w"),
        ("b['log']; b is assigned at a.py:3 in step: b = next(it)", "b['log']"),
        ("y, an argument of loss, which runs from a.py:3", "y"),
        ("b['y'], in an argument of loss", "b['y']"),
        ("table in step", "table"),
    ],
)
@pytest.mark.parametrize(
    ("counts", "how"),
    [
        ({"nan_count": 1, "posinf_count": 1}, "0/0"),
        ({"posinf_count": 1}, "x/0"),
        ({"neginf_count": 1}, "log(0) is -Inf, and so is -1/0"),
    ],
)
def test_what_the_loss_read_from_outside_is_explained_by_what_it_holds(
    variable: str, name: str, counts: dict[str, int], how: str
) -> None:
    loss, nans = build.site("", "", role="loss", label="loss"), build.record(numel=1, nan_count=1)
    made = MadeBy("", "found", inputs=(("self", build.record(**counts)),), variable=variable)
    first = advise(build.report(loss, nans, made_by=made))[0]
    assert f"{name} was not finite before the loss read it: look at the data" in first.text
    assert f"Look where it is made: {how}" in first.text
    assert "not at the model" not in first.text  # which may have computed it under no_grad()
    assert ("a std of one element" in first.text) is (how == "0/0")
    assert ("power of a negative number" in first.text) is (how == "0/0")
    assert first.code == f"assert torch.isfinite({name}).all()"


def test_an_operand_without_a_graph_that_is_not_held() -> None:
    loss, nans = build.site("", "", role="loss", label="loss"), build.record(numel=1, nan_count=1)
    used = "the result is used in total, assigned at a.py:3 in step: total = near - far.log()"
    made = MadeBy("", "found", inputs=(("its operand with a graph", of()),), variable=used)
    first = advise(build.report(loss, nans, made_by=made))[0]
    assert first.text.startswith("The loss read a tensor, or a number, that is not finite")


def test_a_product_in_float16_whose_infinity_became_nan() -> None:
    """The sine of an infinity is what the module returns."""
    read = tuple((name, of(1.0, 5e4, dtype="float16")) for name in ("self", "other"))
    result = build.record("float16", posinf_count=3)
    made = MadeBy("aten.mul.Tensor", "found", "a.py:1", inputs=read, result=result)
    what = build.record("float16", nan_count=3)
    report = build.report(build.site("time", "Fourier"), what, made_by=made)
    assert "left the range of float16: self reaches 50,000" in advise(report)[0].text


@pytest.mark.parametrize("high", [140.0, 250.0])
def test_the_derivative_of_a_power_that_is_out_of_range(high: float) -> None:
    """3 * 250 ** 2 is 187,500, and 3 * 140 ** 2 is 58,800."""
    read = (("self", of(-9.0, high, dtype="float16")), ("exponent", of(3.0, 3.0, numel=1)))
    made = MadeBy("PowBackward0", "found", inputs=read, is_backward=True)
    where = build.site("act", "Gelu", role="grad_input", label="input[0]", direction="backward")
    told = advice_of(build.report(where, build.record("float16", nan_count=8), made_by=made))
    expected = "The derivative of x ** 3 is 3 * x ** 2: self reaches 250, where that is beyond"
    assert (expected in told) is (high == 250.0)


def test_an_infinite_inverse_root_is_that_of_zero() -> None:
    for fields, is_zero in (({"posinf_count": 1}, True), ({"nan_count": 1}, False)):
        made = MadeBy("RsqrtBackward0", "found", result=build.record("float16", **fields))
        what = build.record("float16", nan_count=8)
        told = advice_of(build.report(build.site("norm", "Norm"), what, made_by=made))
        assert ("1/sqrt(0) is Inf" in told) is is_zero


def test_weights_that_may_have_been_written_since_they_were_read() -> None:
    where = build.site("0", "Linear")
    what = build.record("float32", nan_count=8)
    for reason, is_old in ((f"all was finite {WHEN_LAST_READ}", True), ("all was finite", False)):
        told = advice_of(build.report(where, what, reason=reason))
        assert ("the program may have written them since" in told) is is_old
        assert ("or their sum, left the range" in told) is not is_old


def test_a_target_is_data() -> None:
    where = build.site("", "", role="loss", label="loss")
    for label, other in (("target", "self"), ("self", "target")):
        read = ((label, build.record("float32", nan_count=1)), (other, of()))
        made = MadeBy("", "found", inputs=read)
        told = advice_of(build.report(where, build.record("float32", nan_count=1), made_by=made))
        assert ("The target was not finite before the loss read it" in told) is (label == "target")


def test_a_quotient_of_what_has_overflowed() -> None:
    """A softmax by hand; a mask that is divided by a temperature is -Inf."""
    above = {"self": of(posinf_count=2), "other": of(posinf_count=1)}
    told = advice_of(operator_report("DivBackward0", above, backward=True, nan_count=2))
    assert "self and other hold +Inf: Inf / Inf is NaN" in told and "mask after" not in told
    masked = {"self": of(neginf_count=2), "other": of()}
    told = advice_of(operator_report("DivBackward0", masked, backward=True, nan_count=2))
    assert "mask after" in told and "hold +Inf" not in told


def test_a_target_that_has_grown_is_no_growth_of_the_model() -> None:
    read = {"self": of(-1.0, 1.0), "target": of(-1e19, 4e18)}
    told = advice_of(operator_report("aten.mse_loss", read, posinf_count=1))
    assert "the target is too large" in told and "Stop the growth" not in told
    equal = advice_of(
        operator_report("aten.mse_loss", {**read, "self": of(-1e19, 1.0)}, posinf_count=1)
    )
    assert "the target is too large" not in equal


@pytest.mark.parametrize("is_mask", [False, True])
def test_an_infinity_that_a_buffer_has_held(is_mask: bool) -> None:
    """As of an observer of ranges that has seen nothing; a mask holds -Inf on purpose."""
    read = {"self": of(0.0, 0.0), "other": of(neginf_count=1)}
    op = "aten._softmax" if is_mask else "aten.mul.Tensor"
    reason = "it read only finite values and infinities that were stored in buffer q.high"
    report = operator_report(op, read, nan_count=8)
    report = replace(report, culprit=replace(report.culprit, reason=reason))
    assert ("buffer q.high held NaN or Inf before it was read" in advice_of(report)) is not is_mask


def test_what_is_new_against_the_last_healthy_step_comes_first() -> None:
    where, source = build.site("head", "Head"), build.site("", "Net", role="input", label="x")
    what = build.record(nan_count=3, step=41)
    relu = build.record(zero_count=60, low=0.0, step=41)

    def told(now: Any, before: Any) -> str:
        inputs = {"inputs": ((source, now),), "inputs_before": (before,)}
        return advise(build.report(where, what, **inputs))[0].text

    assert "x holds 60 zeros of 1,000, more than" in told(relu, build.record(low=0.1, step=40))
    assert "zeros" not in told(relu, build.record(zero_count=60, low=0.0, step=40))
    one_row = build.record(numel=6, low=0.1, step=41)
    assert "x has 6 elements, and 1,000 in the last" in told(
        one_row, build.record(low=0.1, step=40)
    )
    labels = build.record("int64", low=-100, high=-100, step=41)
    assert "x is -100 throughout" in told(labels, build.record("int64", low=0, high=9, step=40))


def test_an_update_that_divides_by_zero_is_no_learning_rate() -> None:
    before = build.grown("float16", 1.0, 1.0, 3, 8)
    what = build.record("float16", nan_count=3, posinf_count=2, step=9)
    rates = (("AdamW", 1e-3),)
    told = advise(build.report(WEIGHT, what, Verdict.ARRIVED, before, learning_rates=rates))
    assert "By default AdamW on float16 weights divides by zero" in told[0].text
    assert not any("learning rate" in item.text for item in told)
    adagrad = replace(
        build.report(WEIGHT, what, Verdict.ARRIVED, before), learning_rates=(("Adagrad", 1e-3),)
    )
    assert advise(adagrad)[0].code == "Adagrad(parameters, eps=1e-4)"
    wide = build.record(nan_count=3, step=9)
    before = build.grown("float32", 1.0, 1.0, 3, 8)
    mine = build.report(WEIGHT, wide, Verdict.ARRIVED, before, learning_rates=(("Lamb", 1e-3),))
    assert "An update may make NaN of it by a division, 0/0" in advise(mine)[0].text
    assert "a root of what may be below 0 (v - m * m, as of" in advise(mine)[0].text
    assert "optimizer Lamb, lr 0.001" in text_of(mine)


@pytest.mark.parametrize(
    ("first", "factor", "counts", "is_quotient"),
    [
        (0.4, 1.3, {"nan_count": 1}, True),
        (0.4, 1.3, {"nan_count": 1, "posinf_count": 1}, False),
        (1.0, 1.0, {"nan_count": 1, "posinf_count": 1}, True),
        (0.4, 4.0, {"nan_count": 1}, False),
        (2e38, 1.0, {"nan_count": 1}, False),
    ],
)
def test_an_update_makes_nan_of_a_moderate_weight_by_a_quotient_or_a_root(
    first: float, factor: float, counts: dict[str, int], is_quotient: bool
) -> None:
    before = build.grown("float32", first, factor, 8, 8)
    what, rates = build.record(step=9, **counts), (("RMSprop", 1e-3),)
    told = advice_of(build.report(WEIGHT, what, Verdict.ARRIVED, before, learning_rates=rates))
    assert ("RMSprop(centered=True)" in told) is is_quotient
    assert ("lower the learning rate" in told) is not is_quotient
    # An update that multiplies and adds alone makes no NaN of a moderate weight.
    added = build.report(
        WEIGHT, what, Verdict.ARRIVED, before, learning_rates=(("SGD", 1e-3), ("SGD", 1e-2))
    )
    assert ("SGD divides by no number" in advice_of(added)) is is_quotient
    assert ("lower the learning rate" in advice_of(added)) is not is_quotient
    assert "RMSprop" not in advice_of(added)
    infinite = build.record(step=9, posinf_count=1)
    written = build.report(WEIGHT, infinite, Verdict.ARRIVED, before, learning_rates=(("SGD", 1),))
    # An infinity of a weight that grew is one of the growth.
    assert ("SGD divides by no number" in advice_of(written)) is (first == 1.0)
    assert "SGD: 1.00e+38" in advice_of(replace(written, learning_rates=(("SGD", 1e38),)))
    # With a finite state the update of a moderate weight has none either.
    state = MadeBy("", "found", inputs=(("state exp_avg", of()),))
    kept = replace(written, learning_rates=rates, made_by=state)
    assert ("lower the learning rate" in advice_of(kept)) is (first != 1.0)


@pytest.mark.parametrize(
    ("origin", "low", "may_be_rounded"),
    [
        (" (aten.sub.Tensor)", -0.01, True),
        (" (aten.addcmul)", -0.01, True),
        (" (aten.addmm)", -0.01, False),
        ("", -0.01, True),
        (" (aten.sub.Tensor)", -2.0, False),
    ],
)
def test_a_variance_that_is_a_difference(origin: str, low: float, may_be_rounded: bool) -> None:
    read = {f"self{origin}": of(low, 1.7, negative_count=1)}
    told = advice_of(operator_report("aten.sqrt", read, nan_count=1))
    assert f"self{origin} holds 1 negative number (down to " in told
    assert ("squares less the square of a mean, or " in told) is may_be_rounded


def test_an_argument_of_negative_infinity_alone_may_be_the_log_of_0() -> None:
    where = build.site("loss", "KLDivLoss", role="input", label="input[1]")
    made = build.report(where, build.record(neginf_count=2), Verdict.ARRIVED)
    assert advise(made)[1].code == "x.clamp_min(eps).log()"
    other = build.report(where, build.record(nan_count=2), Verdict.ARRIVED)
    assert all("log of 0" not in item.text for item in advise(other))


def test_of_a_weight_that_never_was_finite_there_is_no_earlier_checkpoint() -> None:
    what, before = build.record(posinf_count=1, step=9), build.grown("float32", 1.0, 1.0, 8, 8)
    first = replace(build.report(WEIGHT, what, Verdict.ARRIVED), broken_weights=("fc.weight",))
    assert "repair that first" in advice_of(first) and "load a checkpoint" not in advice_of(first)
    later = replace(first, trend=build.report(WEIGHT, what, before=before).trend)
    assert "first load a checkpoint from before that" in advice_of(later)


def test_code_between_modules_did_not_come_from_outside() -> None:
    where = build.site("attn", "Attention", role="input", label="input[1]")
    what = build.record("float16", neginf_count=3, low=-64000.0, step=5)
    told = advise(build.report(where, what, Verdict.ORIGIN))
    assert "Combine masks as bool" in told[0].text
    assert not any("from outside" in item.text for item in told)
