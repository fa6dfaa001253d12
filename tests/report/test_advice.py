"""The advice of a stop report fits the case."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.record.event import (
    CHANGED_BY_LOOP,
    GIVEN_NUMBER,
    KNOWN_ALONE,
    MAYBE_CHANGED,
    NOT_STEPPED,
    NOT_UPDATED,
    WHEN_LAST_READ,
)
from fastcheck.record.format import Verdict
from fastcheck.report.advice.choose import advise
from fastcheck.report.stop_report import MadeBy, StopReport
from support.records import record_builder as build
from support.reports import all_reports, full_report, text_of


def advice_of(report: StopReport) -> str:
    return " ".join(f"{item.text} {item.code}" for item in advise(report))


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
    assert (
        "An update since step 8 took the largest number of fc.weight from 0.5 to 3.00e+20" in first
    )
    assert "SGD: 10, AdamW: 1.00e-04" in first
    told = advice_of(report)
    assert "1/0" not in told and "division" not in told and "softmax" not in told
    average = advise(replace(report, not_updated=("fc.weight",)))
    assert "The program wrote fc.weight, which no optimizer holds" in average[0].text
    assert not any("learning rate" in item.text or "gradients" in item.text for item in average)
    healthy = replace(report, inputs_before=(build.record(step=8, high=2e20),))
    assert "took the largest number" not in advice_of(healthy)


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
    advice = str(caught.value).partition("\ntry ")[2]
    assert advice.split()[1:4] == ["Stop", "the", "growth"]
    assert "0/0" not in advice


RATES = (("SGD", 50.0),)
WEIGHT = build.site("fc", "Linear", direction="optimizer", role="param", label="weight")
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
    assert "Stop the growth (1.00e+35 times over the steps shown)" in advice_of(report)


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


# Operators


def operator_report(
    op: str,
    inputs: dict[str, Any],
    *,
    backward: bool = False,
    ran: str = "",
    direction: str = "forward",
    dtype: str = "float32",
    numel: int = 8,
    **counts: Any,
) -> StopReport:
    direction, role = ("backward", "grad_input") if backward or ran else (direction, "output")
    label = f"grad_input[0] ({op})" if backward else role
    op = ran or op
    where = build.site("net", "Net", op=op, direction=direction, role=role, label=label)
    what = build.record(dtype, numel=numel, step=5, **counts)
    read = tuple((replace(where, role="input", label=name), one) for name, one in inputs.items())
    return build.report(where, what, inputs=read)


def of(low: float = 0.1, high: float = 1.0, numel: int = 8, **fields: Any) -> Any:
    return build.record(fields.pop("dtype", "float32"), numel=numel, low=low, high=high, **fields)


ZERO = of(0.0, 1.0, zero_count=2)
OPERATORS = {
    "norm of 1e30": (
        operator_report(
            "aten.linalg_vector_norm", {"self": of(high=1e30)}, numel=1, posinf_count=1
        ),
        "self reaches 1.00e+30, whose square is beyond float32's 3.40e+38: the norm is Inf",
    ),
    "a division by a count": (
        operator_report("aten.div.Tensor", {"self": of()}, nan_count=8),
        "divides by a number, or by a tensor of whole numbers, that is 0 or NaN: 0/0 is NaN",
    ),
    "a division by 0.0": (
        operator_report("aten.div.Scalar", {"self": of()}, posinf_count=8),
        "divides by a number, or by a tensor of whole numbers, that is 0: x/0 is Inf, or so small",
    ),
    "a class that is masked": (
        operator_report("aten.neg", {"self": of(neginf_count=2)}, posinf_count=2),
        "self holds 2 -Inf: a class that is masked with -Inf has a log-probability of -Inf",
    ),
    "a product of large numbers": (
        operator_report("aten.mm", {"self": of(high=1e25), "mat2": of(high=1e20)}, nan_count=4),
        "self reaches 1.00e+25 and mat2 1.00e+20, whose product is beyond float32's 3.40e+38",
    ),
    "masks that are added": (
        operator_report(
            "aten.add.Tensor",
            {"self": of(dtype="float16"), "other": of(-65504.0, dtype="float16", neginf_count=1)},
            dtype="float16",
            neginf_count=4,
        ),
        "other already holds -65,504, the lowest number of float16: adding to it gives -Inf",
    ),
    "softmax of +Inf": (
        operator_report("aten._softmax", {"self": of(posinf_count=4)}, nan_count=4),
        "self holds 4 +Inf, and softmax subtracts the largest: Inf - Inf is NaN",
    ),
    "ctc of -Inf": (
        operator_report("aten._ctc_loss", {"log_probs": of(neginf_count=4)}, nan_count=1),
        "log_probs holds 4 NaN or Inf: the gradient of CTC is NaN there",
    ),
    "loss of none": (
        operator_report("aten.smooth_l1_loss", {"self": of(numel=0)}, numel=1, nan_count=1),
        "A mean over no elements is 0/0: self is empty",
    ),
    "a factor of NaN": (
        operator_report("aten.mul_.Tensor", {"self": of()}, nan_count=8),
        "self held finite numbers alone, so the number that mul multiplies them by is NaN or Inf",
    ),
    "a factor of Inf": (
        operator_report("aten.mul_.Tensor", {"self": of()}, posinf_count=4, neginf_count=4),
        "the number that mul multiplies them by is Inf, or beyond the format",
    ),
    "the derivative of a cube in float16": (
        operator_report(
            "aten.pow.Tensor_Scalar",
            {"self": of(high=62368.0, dtype="float16")},
            backward=True,
            dtype="float16",
            posinf_count=8,
        ),
        "The backward of pow made Inf of numbers up to 62,368: the result is beyond float16's",
    ),
    "a mask times Inf": (
        operator_report("aten.mul.Tensor", {"self": ZERO}, nan_count=2, neginf_count=6),
        "self is 0 in 2 of 8 elements, and no other element became NaN: the number that it is "
        "multiplied by is Inf",
    ),
    "a mask of zeros times Inf": (
        operator_report("aten.mul.Tensor", {"self": of(0.0, 0.0, zero_count=8)}, nan_count=8),
        "self is 0 throughout: the number that it is multiplied by is Inf or NaN, and 0 * Inf is",
    ),
    "gradients whose squares an optimizer keeps": (
        operator_report(
            "aten.addcmul_",
            {"self": ZERO, "tensor1": of(-2e34), "tensor2": of(-2e34)},
            direction="optimizer",
            posinf_count=8,
        ),
        "(the loss of this step, if they are gradients), and clip these before the update",
    ),
    "fused Adam without eps": (
        operator_report("aten._fused_adam_", {"self": of()}, nan_count=2),
        "It divides by sqrt(exp_avg_sq), 0 where a gradient always was, and the eps that",
    ),
    "a learned exponent": (
        operator_report(
            "aten.pow.Tensor_Tensor",
            {"self": of(-2.0, 1.0, negative_count=3)},
            backward=True,
            nan_count=3,
        ),
        "the derivative of x ** p by p, x ** p * log(x)",
    ),
    "alpha of NaN": (
        operator_report("aten.add_.Tensor", {"self": of(), "other": of()}, nan_count=8),
        "self and other held finite numbers alone",
    ),
    "an alpha that is far too large": (
        operator_report("aten.add_.Tensor", {"self": of(), "other": of(-2.0, 2.0)}, posinf_count=8),
        "the number that add adds or multiplies by (alpha) is Inf, or above 1.70e+38",
    ),
    "a power within the backward, of numbers of both signs": (
        operator_report(
            "aten.pow.Tensor_Scalar",
            {"self": of(-776.0, 835.5, dtype="float16", negative_count=4)},
            dtype="float16",
            backward=True,
            posinf_count=3,
        ),
        "The backward of pow made Inf of numbers up to 835.5: the result is beyond float16's",
    ),
    "a factor of the loss": (
        operator_report("aten.mul.Tensor", {"self": of(1.0, 10.0)}, backward=True, posinf_count=1),
        "the number that mul multiplies them by is Inf, or above 3.40e+37",
    ),
    "exp in a part that is recomputed": (
        operator_report("aten.exp", {"self": of(0.0, 200.0)}, backward=True, posinf_count=1),
        "self reaches 200: exp of more than 88.7 is beyond the range of float32",
    ),
    "lgamma of a large number": (
        operator_report("aten.lgamma", {"self": of(1.0, 2e37)}, posinf_count=2),
        "self reaches 2.00e+37: lgamma of it, about x * log(x), is beyond float32's 3.40e+38",
    ),
    "lgamma of 0": (
        operator_report("aten.lgamma", {"self": ZERO}, posinf_count=2),
        "lgamma is infinite or NaN at 0 and at negative whole numbers",
    ),
    "acosh of 0.5": (
        operator_report("aten.acosh", {"self": of(0.5, 2.0)}, nan_count=1),
        "self goes from 0.5 to 2: acosh is NaN below 1. Clamp",
    ),
    "acos of 2": (
        operator_report("aten.acos", {"self": of(-1.0, 2.0)}, nan_count=1),
        "acos is NaN outside of -1 to 1. Clamp",
    ),
    "exp in float16": (
        operator_report(
            "aten.exp", {"self": of(0.0, 20.0, dtype="float16")}, dtype="float16", posinf_count=1
        ),
        "x.clamp(max=10).exp()",
    ),
    "exp2 of 130": (
        operator_report("aten.exp2", {"self": of(0.0, 130.0)}, posinf_count=1),
        "exp2 of more than 128.0 is beyond the range of float32",
    ),
    "a cast": (
        operator_report(
            "aten._to_copy", {"self": of(0.0, 120_000.0)}, dtype="float16", posinf_count=1
        ),
        "self reaches 120,000, and float16 ends at 65,504: the cast makes Inf",
    ),
    "weight_norm of 0": (
        operator_report("aten._weight_norm_interface", {"v": ZERO, "g": ZERO}, nan_count=2),
        "weight_norm divides a weight by its norm",
    ),
    "target that is masked": (
        operator_report(
            "aten.nll_loss_forward", {"self": of(-3.0, -1.0, neginf_count=2)}, posinf_count=1
        ),
        "where one of them is the target the loss is Inf",
    ),
    "difference of 0": (
        operator_report(
            "aten.div.Tensor", {"self": of(), "other (aten.rsub.Scalar)": ZERO}, posinf_count=2
        ),
        "1 - beta ** t at t = 0 (count from 1)",
    ),
    "quotient of densities": (
        operator_report("aten.div.Tensor", {"self": ZERO, "other (aten.exp)": ZERO}, nan_count=2),
        "take the difference first",
    ),
    "target that has grown": (
        operator_report(
            "aten.mse_loss", {"self": of(-1.0, 1.0), "target": of(-1e19, 4e18)}, posinf_count=1
        ),
        "target reaches 1.00e+19, and self 1: the target is too large",
    ),
    "logdet": (
        operator_report("aten.scalar_tensor", {}, numel=1, nan_count=1),
        "torch.logdet does that for a matrix whose determinant is negative",
    ),
    "number written on a device": (
        operator_report("aten.scalar_tensor", {}, numel=1, nan_count=1),
        "look where it comes from, the data (a missing value, a target)",
    ),
    "std of one": (
        operator_report("aten.std.correction", {"self": of(numel=1)}, numel=1, nan_count=1),
        "std of one element is 0/0",
    ),
    "mean of none": (
        operator_report("aten.mean", {"self": of(numel=0)}, numel=1, nan_count=1),
        "A mean over no elements is 0/0: self is empty",
    ),
    "0/0": (
        operator_report("aten.div.Tensor", {"self": ZERO, "other": ZERO}, nan_count=2),
        "The divisor other is 0 in 2 of 8 elements: 0/0 is NaN",
    ),
    "x/0": (
        operator_report("aten.div.Tensor", {"self": of(), "other": ZERO}, posinf_count=2),
        "x/0 is Inf",
    ),
    "x/norm": (
        operator_report(
            "aten.div.Tensor",
            {"self": ZERO, "other (aten.linalg_vector_norm)": ZERO},
            nan_count=2,
        ),
        "It is a norm: that of a row of zeros is 0",
    ),
    "x/sum": (
        operator_report(
            "aten.div.Tensor", {"self": ZERO, "other (aten.sum.dim_IntList)": ZERO}, nan_count=2
        ),
        "nothing was counted",
    ),
    "log of 0": (
        operator_report("aten.log", {"self": ZERO}, neginf_count=2),
        "self is 0 in 2 of 8 elements: log(0) is -Inf",
    ),
    "log of -2": (
        operator_report("aten.log", {"self": of(-2.0, negative_count=1)}, nan_count=1),
        "self goes down to -2: log of a negative number is NaN",
    ),
    "log1p of -1": (
        operator_report(
            "aten.log1p",
            {"self": of(-1.0, 0.0, dtype="bfloat16")},
            dtype="bfloat16",
            neginf_count=1,
        ),
        "log1p(-1) is log(0)",
    ),
    "sqrt of -2": (
        operator_report("aten.sqrt", {"self": of(-2.0, negative_count=3)}, nan_count=3),
        "self holds 3 negative numbers (down to -2): sqrt of them is NaN",
    ),
    "rsqrt of 0": (
        operator_report("aten.rsqrt", {"self": ZERO}, posinf_count=2),
        "1/sqrt(0) is Inf",
    ),
    "exp of 95": (
        operator_report("aten.exp", {"self": of(0.0, 95.0)}, posinf_count=1),
        "self reaches 95: exp of more than 88.7 is beyond the range of float32",
    ),
    "softmax": (
        operator_report("aten._softmax", {"self": of(neginf_count=4)}, nan_count=4),
        "A row that is masked whole",
    ),
    "ctc": (
        operator_report("aten._ctc_loss", {"log_probs": of(-3.0, -1.0)}, posinf_count=1),
        "a target is longer than the frames",
    ),
    "labels": (
        operator_report("aten.nll_loss_forward", {"self": of(-3.0, -1.0)}, numel=1, nan_count=1),
        "every target is ignore_index",
    ),
    "weights of classes, one without samples": (
        operator_report(
            "aten.nll_loss_forward",
            {"self": of(-3.0, -1.0), "weight (buffer weight)": of(posinf_count=1)},
            numel=1,
            nan_count=1,
        ),
        "weight (buffer weight) holds Inf, such as 1 / count",
    ),
    "0 * Inf": (
        operator_report(
            "aten.mul.Tensor", {"self": ZERO, "other": of(posinf_count=2)}, nan_count=2
        ),
        "other holds Inf, and 0 * Inf is NaN where self is 0",
    ),
    "sum in float16": (
        operator_report(
            "aten.sum",
            {"self": of(dtype="float16", numel=90000)},
            dtype="float16",
            numel=1,
            posinf_count=1,
        ),
        "A sum of 90,000 elements in float16, which ends at 65,504",
    ),
    "sums of rows in float16": (
        operator_report(
            "aten.sum.dim_IntList",
            {"self": of(dtype="float16", numel=256000)},
            dtype="float16",
            numel=128,
            posinf_count=1,
        ),
        "A sum of 2,000 elements in float16, which ends at 65,504",
    ),
    "cumulative sum in float16": (
        operator_report(
            "aten.cumsum",
            {"self": of(dtype="float16", numel=90000)},
            dtype="float16",
            numel=90000,
            posinf_count=1,
        ),
        "A sum in float16, which ends at 65,504",
    ),
    "masks added": (
        operator_report(
            "aten.add.Tensor",
            {"self": of(-65504.0, dtype="float16"), "other": of(-64.0, dtype="float16")},
            dtype="float16",
            neginf_count=2,
        ),
        "self already holds -65,504, the lowest number of float16",
    ),
    "acos": (operator_report("aten.acos", {"self": of(-1.5)}, nan_count=1), "outside of -1 to 1"),
    "Adam": (
        operator_report(
            "aten.addcdiv_",
            {"self": of(), "tensor1": ZERO, "tensor2": of(0.0, zero_count=3, dtype="float16")},
            direction="optimizer",
            dtype="float16",
            nan_count=3,
        ),
        "below 3e-8, as Adam's 1e-8, eps is 0 in float16",
    ),
    "an optimizer without an eps": (
        operator_report(
            "aten.addcdiv_",
            {"self": of(), "tensor1": ZERO, "tensor2": ZERO},
            direction="optimizer",
            nan_count=3,
        ),
        "is 0 in 2 of 8 elements, and the eps that the optimizer adds, if any, is lost",
    ),
    "norm of infinities": (
        operator_report(
            "aten.linalg_vector_norm",
            {"self": of(high=1e30, posinf_count=2)},
            numel=1,
            posinf_count=1,
        ),
        "self holds 2 Inf, of which linalg_vector_norm makes infinities",
    ),
    "log1p backward": (
        operator_report("aten.log1p", {"self": ZERO}, backward=True, posinf_count=2),
        "torch.where after it does not stop it. x.clamp_min(-1 + eps).log1p()",
    ),
    "log1p": (
        operator_report("aten.log1p", {"self": of(-1.0, zero_count=0)}, neginf_count=2),
        "log1p(-1) is log(0), -Inf. Clamp it. x.clamp_min(-1 + eps).log1p()",
    ),
    "entr": (
        operator_report("aten.special_entr", {"self": of(-0.2, negative_count=3)}, neginf_count=3),
        "self holds 3 negative numbers (down to -0.2), of which -x * log(x) is -Inf here",
    ),
    "squares in float16": (
        operator_report(
            "aten.pow.Tensor_Scalar",
            {"self": of(0.0, 2170.0, dtype="float16", zero_count=120)},
            dtype="float16",
            posinf_count=97,
            zero_count=120,
        ),
        "self goes from 0 to 2,170: a power of it is beyond the range of float16",
    ),
    "sqrt backward": (
        operator_report("aten.sqrt", {"self": of(), "other": ZERO}, backward=True, nan_count=2),
        "The derivative of sqrt is infinite at 0",
    ),
    "div backward": (
        operator_report("aten.div.Tensor", {"other": ZERO}, backward=True, posinf_count=2),
        "make the divisor safe before",
    ),
    "log backward": (
        operator_report("aten.log", {"other": ZERO}, backward=True, posinf_count=2),
        "on logits. torch.where after it does not stop it",
    ),
    "svd backward": (
        operator_report("aten._linalg_svd", {"self": of()}, backward=True, nan_count=2),
        "singular values: two equal ones",
    ),
    "addmm of -Inf": (
        operator_report("aten.addmm", {"self": of(), "mat1": of(neginf_count=3)}, nan_count=3),
        "mat1 holds 3 -Inf, of which addmm makes NaN (Inf - Inf, 0 * Inf, sin(Inf))",
    ),
    "sin of Inf": (
        operator_report("aten.sin", {"self": of(posinf_count=1)}, nan_count=1),
        "self holds 1 Inf, of which sin makes NaN",
    ),
    "a product with Inf": (
        operator_report(
            "aten.mul.Tensor", {"self": of(), "other": of(posinf_count=8)}, posinf_count=8
        ),
        "other holds 8 Inf, of which mul makes infinities",
    ),
    "0 * Inf, of which the zeros are not held": (
        operator_report("aten.mul.Tensor", {"self": of(posinf_count=2)}, nan_count=2),
        "self holds Inf, and 0 * Inf is NaN where the other factor is 0",
    ),
    "a product below the range": (
        operator_report("aten.mul.Tensor", {"self": of(high=1e30)}, neginf_count=8),
        "aten.mul.Tensor made Inf of numbers up to 1.00e+30 in magnitude",
    ),
    "filled with Inf": (
        operator_report("aten.masked_fill.Scalar", {"self": of()}, posinf_count=1),
        "aten.masked_fill.Scalar was given Inf as a number",
    ),
    "maximum over nothing": (
        operator_report("aten.amax", {"self": of(neginf_count=2)}, neginf_count=1),
        "has nothing to choose from (a node without neighbours)",
    ),
    "labels of no rows": (
        operator_report("aten.nll_loss_forward", {"self": of(numel=0)}, numel=1, nan_count=1),
        "A mean over no elements is 0/0: self is empty",
    ),
    "a factor beyond float32": (
        operator_report("aten.mul.Tensor", {"self": of(high=5.0)}, posinf_count=1),
        "so the number that mul multiplies them by is Inf, or above 6.81e+37",
    ),
    "scores beyond float32": (
        operator_report(
            "aten._scaled_dot_product_flash_attention_for_cpu",
            {"query": of(high=2e30), "key": of(high=1e30), "value": of(high=1e30)},
            nan_count=8,
        ),
        "query reaches 2.00e+30 and key 1.00e+30, whose product is beyond float32's 3.40e+38",
    ),
    "a running variance below 0": (
        operator_report(
            "aten.native_batch_norm",
            {"input": of(), "running_var (buffer bn.running_var)": of(-1.0, negative_count=1)},
            nan_count=8,
        ),
        "running_var holds 1 negative number (down to -1), and no variance is below 0",
    ),
    "layer norm without eps": (
        operator_report("aten.native_layer_norm", {"input": ZERO, "weight": of()}, nan_count=8),
        "where eps is 0, or too small, that is 0/0",
    ),
    "logit of 1": (
        operator_report("aten.logit", {"self": of()}, posinf_count=1),
        "logit is NaN outside of 0 to 1, and infinite at these. Clamp it inside. x.logit(eps=1e-4)",
    ),
    "xlogy of 0": (
        operator_report("aten.xlogy.Tensor", {"self": of(), "other": ZERO}, neginf_count=2),
        "other is 0 in 2 of 8 elements: log(0) is -Inf",
    ),
    "mse of 1e30": (
        operator_report("aten.mse_loss", {"self": of(high=1e30)}, numel=1, posinf_count=1),
        "self reaches 1.00e+30, whose square is beyond float32's 3.40e+38. Look for",
    ),
    "a product of two large numbers": (
        operator_report(
            "aten.mul.Tensor", {"self": of(high=1e25), "other": of(high=1e20)}, posinf_count=4
        ),
        "self reaches 1.00e+25 and other 1.00e+20, whose product is beyond float32's 3.40e+38",
    ),
    "slogdet of 0": (
        operator_report("aten._linalg_slogdet", {"A": ZERO}, numel=1, neginf_count=1),
        "the log of zero (of the determinant of a singular matrix, too: add eps * torch.eye(n)",
    ),
    "logaddexp backward": (
        operator_report(
            "aten.logaddexp",
            {"self": of(neginf_count=2), "other": of(neginf_count=2)},
            backward=True,
            nan_count=2,
        ),
        "Two operands that are both -inf: the logaddexp is -Inf",
    ),
    "an operator that has no rule, backward": (
        operator_report(
            "aten.linalg_householder_product",
            {"self": of(high=2e30), "other": of(high=2e30)},
            backward=True,
            posinf_count=6,
        ),
        "The backward of linalg_householder_product made Inf of numbers up to 2.00e+30",
    ),
    "logcumsumexp backward": (
        operator_report(
            "aten.logcumsumexp", {"self": of(neginf_count=1)}, backward=True, nan_count=1
        ),
        "A row that begins with -inf: the logcumsumexp is -Inf",
    ),
    "logsumexp of a row of -Inf": (
        operator_report("aten.logsumexp", {"self": of(neginf_count=3)}, neginf_count=1),
        "A row of nothing but -inf: the logsumexp is -Inf",
    ),
    "qr backward": (
        operator_report("aten.linalg_qr", {"self": of()}, backward=True, nan_count=2),
        "The backward of qr divides by the diagonal of R",
    ),
    "logit backward": (
        operator_report("aten.logit", {"self": of()}, backward=True, nan_count=2),
        "The derivative of logit is infinite at 0 and 1",
    ),
    "a missing target that is left out after a square": (
        operator_report(
            "aten.pow",
            {"self": of(-1.4, nan_count=1, negative_count=8)},
            backward=True,
            nan_count=1,
        ),
        "self holds NaN: 0 * NaN is NaN, also where the result was masked away",
    ),
    "acosh backward": (
        operator_report("aten.acosh", {"self": of(1.0, 3.0)}, backward=True, posinf_count=2),
        "The derivative of acosh is infinite at 1, where its input came",
    ),
    "acosh backward below 1, left out after it": (
        operator_report("aten.acosh", {"self": of(-2.0, 3.0)}, backward=True, nan_count=2),
        "self goes from -2 to 3: acosh is NaN below 1. Clamp it inside.",
    ),
    "a division by next to nothing": (
        operator_report("aten.div.Tensor", {"self": of(), "other": of(1e-40)}, posinf_count=2),
        "The divisor other is down to 1.00e-40: the quotient is beyond 3.40e+38",
    ),
    "a negative divisor that is next to nothing": (
        operator_report(
            "aten.div.Tensor", {"self": of(), "other": of(-1.0, -1e-40)}, posinf_count=2
        ),
        "The divisor other is down to 1.00e-40",
    ),
    "div backward by what has no square": (
        operator_report(
            "aten.div.Tensor",
            {"self": of(), "other": of(1e-30)},
            backward=True,
            posinf_count=2,
        ),
        "divides by the square of n, and other is down to 1.00e-30",
    ),
    "exp in a backward of the program's own": (
        operator_report("", {"self": of(0.0, 95.0)}, ran="aten.exp", posinf_count=1),
        "self reaches 95: exp of more than 88.7 is beyond the range of float32",
    ),
    "a division in a backward of the program's own": (
        operator_report("", {"self": of(), "other": ZERO}, ran="aten.div.Tensor", posinf_count=2),
        "The divisor other is 0 in 2 of 8 elements: x/0 is Inf",
    ),
    "acos of a cosine that is rounded": (
        operator_report("aten.acos", {"self": of(-1.0, 1.0000001)}, nan_count=1),
        "self goes from -1 to 1 (1.00e-07 beyond, as by rounding): acos is NaN outside of -1 to 1",
    ),
    "acosh of what is rounded": (
        operator_report("aten.acosh", {"self": of(0.9999999, 2.0)}, nan_count=1),
        "(1.00e-07 beyond, as by rounding): acosh is NaN below 1",
    ),
    "an operator that has no rule": (
        operator_report("aten.special_i0", {"self": of(high=2000.0)}, nan_count=8),
        "aten.special_i0 made NaN of numbers up to 2,000 in magnitude: a number left",
    ),
    "matrix_exp of large numbers": (
        operator_report("aten.linalg_matrix_exp", {"self": of(high=2000.0)}, nan_count=8),
        "matrix_exp grows as exp() of the largest real part of the eigenvalues",
    ),
    "cosh of -95": (
        operator_report("aten.cosh", {"self": of(-95.0, 1.0)}, posinf_count=1),
        "self reaches 95 in magnitude: cosh of more than 89.4 is beyond the range of float32",
    ),
    "sinh of -95": (
        operator_report("aten.sinh", {"self": of(-95.0, 1.0)}, neginf_count=1),
        "x.clamp(-20, 20).sinh()",
    ),
    "a mask that is cast": (
        operator_report(
            "aten._to_copy", {"self": of(-1e9, 0.0)}, dtype="float16", neginf_count=1, low=0, high=0
        ),
        "self holds -1.00e+09 and 0, as a mask does, and float16 ends at 65,504",
    ),
    "log of whole numbers": (
        operator_report("aten.log", {}, neginf_count=1),
        "aten.log read whole numbers, which hold zeros: log(0) is -Inf",
    ),
    "numbers below 0 that are cast": (
        operator_report(
            "aten._to_copy",
            {"self": of(-1e9, 0.0)},
            dtype="float16",
            neginf_count=1,
            low=-9,
            high=0,
        ),
        "self reaches 1.00e+09, and float16 ends at 65,504",
    ),
    "sinh of whole numbers": (
        operator_report("aten.sinh", {}, neginf_count=1),
        "Its input is above 89.4 in magnitude",
    ),
    "a division by an inverse root": (
        operator_report(
            "aten.div.Tensor", {"self": of(), "other (aten.rsqrt)": ZERO}, posinf_count=2
        ),
        "x/0 is Inf. Add an eps to it or clamp it.",
    ),
    "a division by a variance": (
        operator_report(
            "aten.div.Tensor", {"self": of(), "other (aten.var.correction)": ZERO}, posinf_count=2
        ),
        "It is a variance, which is 0 where all are equal: add an eps to it. x / (var + eps)",
    ),
    "a power of small numbers": (
        operator_report("aten.pow.Tensor_Scalar", {"self": of(1e-3, 1.0)}, posinf_count=1),
        "Look for what made it so large (for a negative power: so small)",
    ),
    "addcdiv of the program's own": (
        operator_report(
            "aten.addcdiv", {"self": of(), "tensor1": of(), "tensor2": ZERO}, posinf_count=2
        ),
        "The divisor tensor2 is 0 in 2 of 8 elements: 0/0 is NaN, and x/0 Inf. Add an eps to it.",
    ),
    "a median of nothing": (
        operator_report("aten.median", {"self": build.record(numel=0)}, numel=1, nan_count=1),
        "aten.median read no elements",
    ),
    "log of negative whole numbers": (
        operator_report("aten.log2", {}, nan_count=1),
        "hold negative numbers: their logarithm is NaN. Clamp them. x.clamp_min(1).log()",
    ),
    "a negative power of whole numbers": (
        operator_report("aten.pow.Tensor_Scalar", {}, posinf_count=1),
        "read whole numbers: a negative power of 0 is Inf, as of a count of 0",
    ),
    "x/sqrt": (
        operator_report("aten.div.Tensor", {"self": ZERO, "other (aten.sqrt)": ZERO}, nan_count=2),
        "It is a root, of 0 there: a norm of zeros, or a variance of equal numbers",
    ),
    "eigh backward": (
        operator_report("aten._linalg_eigh", {"self": of()}, backward=True, posinf_count=2),
        "eigenvalues: two equal ones",
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_first_item_is_what_the_operator_did_with_its_values(name: str) -> None:
    report, wanted = OPERATORS[name]
    first = advise(report)[0]
    assert wanted in f"{first.text} {first.code}"
    assert "lower the learning rate" not in advice_of(report)


@pytest.mark.parametrize("kind", ["posinf_count", "nan_count"])
def test_xlogy_has_no_number_beside_its_operands(kind: str) -> None:
    inputs = {"self": of(-2.0, 2.0, negative_count=2), "other": of(-1.0, 1.0, zero_count=2)}
    told = advice_of(operator_report("aten.xlogy.Tensor", inputs, **{kind: 2}))
    assert "other" in told and "held finite numbers alone" not in told


@pytest.mark.parametrize(
    ("op", "counts"),
    [
        ("aten.pow.Scalar", {"posinf_count": 1}),  # 2 ** 200
        ("aten.pow.Tensor_Scalar", {"posinf_count": 1, "high": 1e30}),
        ("aten.mse_loss", {"nan_count": 1, "dtype": "float16"}),
    ],
)
def test_what_another_cause_would_have_left_is_not_said(op: str, counts: dict[str, Any]) -> None:
    told = advice_of(operator_report(op, {}, **counts))
    assert "a negative power of 0" not in told and "a term of it" not in told


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("name", ["full", "clamp", "lerp"])
def test_a_number_that_an_operator_was_given(name: str, level: str) -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if name == "full":
                return y + torch.full((2,), math.nan)
            return y.clamp(max=math.nan) if name == "clamp" else y.lerp(x[:, :2], math.nan)

    model = Model(4, 2)
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(3, 4)).sum().backward()
    assert re.search(rf"try 1. aten.{name}[.\w]* was given a number that is NaN", said(stop.value))


def test_an_operator_of_the_loss_without_a_rule_is_named() -> None:
    model = torch.nn.Linear(4, 4)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        near = model(torch.ones(3, 4)) * 1e12
        (near.cumprod(1) * 1e-20).mean().backward()
    told = said(stop.value)
    assert "try 1. CumprodBackward0 made Inf of numbers up to" in told and "0/0" not in told


def test_an_operator_that_may_have_read_what_is_not_held_is_accused_of_nothing() -> None:
    """The node of a solve keeps no right-hand side, and that of ``x * 2`` no x."""
    model = torch.nn.Linear(4, 4)

    def solved(rows: torch.Tensor) -> torch.Tensor:
        rest = rows.sum(1, keepdim=True) + torch.tensor([[1.0], [math.nan], [0.5]])
        matrix = torch.eye(3) + rows @ rows.T
        return torch.linalg.solve_triangular(matrix, rest, upper=False).sum()

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        solved(model(torch.eye(3, 4))).backward()
    assert "try 1. If what it solves for is finite (targets may hold NaN), it" in said(stop.value)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        (model(torch.ones(3, 4)).square().sum() * 1e38 * 1e3).backward()
    assert "try 1. MulBackward0 read NaN or Inf, in what is not held, or made" in said(stop.value)


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_softmax_whose_input_is_not_held_is_taken_for_masked_where_it_shows(
    is_masked: bool,
) -> None:
    result = build.record(nan_count=8, neginf_count=8 * is_masked, step=5)
    made = MadeBy("LogSoftmaxBackward0", f"the first operator {KNOWN_ALONE}", result=result)
    loss = build.site("", "", role="loss", label="loss")
    told = advise(build.report(loss, build.record(nan_count=1, step=5), made_by=made))[0].text
    assert told.startswith("A row that is masked whole") is is_masked
    assert ("makes NaN of a row that holds +Inf, and of a row" in told) is not is_masked


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_softmax_with_zeros_may_be_of_large_scores(is_masked: bool) -> None:
    """At a rate of 30 products in float16 overflow, and other rows have scores far apart."""

    def softmax(rows: torch.Tensor) -> torch.Tensor:
        scores = (rows.half() * (1 if is_masked else 40000) * torch.eye(4).half()).float()
        keeps = torch.ones(4, 4).tril(-1).bool() if is_masked else torch.ones(4, 4).bool()
        return scores.masked_fill(~keeps, -math.inf).softmax(-1).square().sum()

    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.bias, 9.0)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        softmax(model(torch.zeros(4, 4)) * torch.tensor([[1.0], [1.0], [0.1], [0.1]])).backward()
    told = said(stop.value)
    assert "as one that is masked whole, and of one that holds +Inf" in told
    assert "If there is a mask, let every query attend" in told
    assert "A row that is masked whole: softmax" not in told


def test_the_order_of_a_norm_is_no_infinity_that_was_given() -> None:
    model = torch.nn.Linear(4, 4)
    stops = pytest.raises(fastcheck.OverflowDetected)
    with fastcheck.install(model, level="op"), stops as stop:
        scaled = model(torch.ones(3, 4)) * 1e38 * 1e3
        torch.linalg.vector_norm(scaled, ord=math.inf).backward()
    assert "in output of aten.mul.Tensor" in said(stop.value)


def test_the_setting_of_an_update_is_named_once() -> None:
    report = operator_report("aten.lerp_", {"self": of()}, direction="optimizer", posinf_count=2)
    culprit = replace(report.culprit, reason=f"everything was finite{GIVEN_NUMBER}")
    assert "lerp_ was given a number" in advice_of(replace(report, culprit=culprit))
    told = advice_of(replace(report, culprit=culprit, fault="SGD has stepped with a rate of inf"))
    assert "SGD has stepped" in told and "was given a number" not in told


@pytest.mark.parametrize("name", ["MaskedFill", "ConstantPadNd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_infinity_that_a_loss_writes_is_no_overflow(dtype: torch.dtype, name: str) -> None:
    model = torch.nn.Linear(4, 2)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        scores = model(torch.ones(3, 4)).to(dtype).sigmoid()
        masked = scores.masked_fill(scores > 0, -math.inf)
        padded = torch.nn.functional.pad(scores, (1, 1), value=-math.inf)
        (masked if name == "MaskedFill" else padded).amin().backward()
    assert f"{name}Backward0" in said(stop.value)
    assert "left the range" not in said(stop.value) and "leaves the" not in said(stop.value)


def test_an_operator_without_a_rule_that_overflows_has_advice() -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * 1e30).cumprod(1) * 0

    model = Model(4, 4)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(3, 4)).sum().backward()
    told = said(stop.value)
    assert "try 1. aten.cumprod made Inf of numbers up to" in told and "divided by 0" not in told


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (0.5, 1.0)) for name in ("0/0", "log of 0", "sqrt of -2", "exp of 95")),
        ("div backward", (0.5, 1.0)),
        ("a division by next to nothing", (0.5, 1.0)),
        ("div backward by what has no square", (0.5, 1.0)),
        ("acosh backward", (1.5, 3.0)),
        ("logit backward", (0.1, 0.9)),
    ],
)
def test_values_that_do_not_explain_the_result_give_no_such_advice(
    name: str, values: tuple[float, float]
) -> None:
    report, wanted = OPERATORS[name]
    harmless = tuple((site, of(*values)) for site, _ in report.inputs)
    assert wanted not in advice_of(replace(report, inputs=harmless))


def test_growth_from_near_0_or_of_a_few_doublings_has_led_to_no_overflow() -> None:
    report, wanted = OPERATORS["0/0"]
    for first, factor in ((1e-8, 40.0), (0.1, 2.0)):
        before = build.grown("float32", first, factor, 4, 4)
        trend = np.stack([*before, report.culprit.record])
        told = advice_of(replace(report, trend=trend))
        assert wanted in told and "Stop the growth" not in told


def test_growth_makes_no_zero() -> None:
    report, wanted = OPERATORS["0/0"]
    for bad, is_first in ((2, True), (3, False)):
        what = build.record(nan_count=bad, step=41)
        trend = np.stack([*build.grown("float32", 1.0, 50.0, 4, 4), what])
        culprit = replace(report.culprit, record=what)
        first = advise(replace(report, trend=trend, culprit=culprit))[0].text
        assert (wanted in first) is is_first and ("Stop the growth" in first) is not is_first


def test_an_operator_that_only_multiplies_and_adds_left_the_range_of_16_bits() -> None:
    """The module casts its result to float32."""
    result, what = build.record("float16", posinf_count=8), build.record(posinf_count=8)
    for name, is_left in (("aten.mul.Tensor", True), ("aten.fill.Scalar", False)):
        read = (("self", of(-1.0, 300.0, dtype="float16")),)
        made = MadeBy(name, "found", "a.py:1", inputs=read, result=result)
        told = advice_of(build.report(build.site("layer", "Layer"), what, made_by=made))
        assert (f"{name} left the range of float16, which ends at 65,504" in told) is is_left


def test_an_operator_that_has_no_rule_is_given_no_cause() -> None:
    report = operator_report("aten.special_i0", {"self": of(high=120.0)}, posinf_count=8)
    first = advise(report)[0].text
    assert "aten.special_i0 made Inf of numbers up to 120 in magnitude" in first
    assert "exp of a large number" not in first and "division" not in first


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
    ("optimizers", "code"),
    [
        (["SGD"], "Adam("),
        (["LBFGS"], "Adam("),
        (["SGD", "AdamW"], "AdamW("),
        (["RMSprop"], "RMSprop("),
        ([], "Adam("),
    ],
)
def test_an_eps_is_that_of_an_optimizer_that_has_one(optimizers: list[str], code: str) -> None:
    rates = tuple((name, 1e-3) for name in optimizers)
    report = replace(OPERATORS["Adam"][0], learning_rates=rates)
    assert advise(report)[0].code == f"{code}parameters, eps=1e-4)"
    before = build.grown("float32", 1.0, 1.1, 8, 8)
    what = build.record(posinf_count=1, step=9)
    told = advice_of(build.report(WEIGHT, what, Verdict.ARRIVED, before, learning_rates=rates))
    has_eps = optimizers not in (["SGD"], ["LBFGS"])
    assert ("Check the schedule" in told) is (optimizers != ["SGD"])
    assert ("the optimizer's eps" in told) is has_eps


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


def test_four_items_at_most() -> None:
    reports = [*all_reports(), *(report for report, _ in OPERATORS.values())]
    assert max(len(advise(report)) for report in reports) <= 4


def test_code_between_modules_did_not_come_from_outside() -> None:
    where = build.site("attn", "Attention", role="input", label="input[1]")
    what = build.record("float16", neginf_count=3, low=-64000.0, step=5)
    told = advise(build.report(where, what, Verdict.ORIGIN))
    assert "Combine masks as bool" in told[0].text
    assert not any("from outside" in item.text for item in told)


def said(stop: fastcheck.OverflowDetected) -> str:
    return " ".join(str(stop).split())


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_loss_that_overflows_in_float16_is_computed_in_float32(level: str) -> None:
    model = torch.nn.Linear(8, 64).half()
    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.ones(16, 8, dtype=torch.float16))
        torch.nn.functional.mse_loss(y, torch.full_like(y, 60.0), reduction="sum").backward()
    text = said(stop.value)
    assert "in float16, which ends at 65,504: a term of it, or their sum" in text
    assert "log(0)" not in text


def test_a_product_between_the_model_and_the_loss_in_float16() -> None:
    model = torch.nn.Linear(8, 64).half()
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.full((16, 8), 200.0, dtype=torch.float16))
        scores = y @ y.T
        scores.float().mean().backward()
    assert "try 1. MmBackward0 left the range of float16, which ends at 65,504" in said(stop.value)


@pytest.mark.parametrize("level", ["module", "op"])
def test_lbfgs_without_a_line_search(level: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=30.0)
    x = torch.randn(32, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 100 * x[:, :1] ** 3).square().mean()
        loss.backward()
        return loss

    with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected) as stop:
        optimizer.step(closure)
    assert "try 1. Numbers left the range of float32 within a step of LBFGS" in said(stop.value)


def test_an_infinite_batch_is_no_fault_of_lbfgs() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    batches = iter([torch.randn(8, 4), torch.randn(8, 4), torch.full((8, 4), math.inf)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        return loss

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        optimizer.step(closure)
    assert "try 1. The batch was non-finite" in said(stop.value)


@pytest.mark.parametrize("level", ["module", "op"])
def test_an_average_of_weights_that_grows(level: str) -> None:
    torch.manual_seed(0)  # it is read in the first step, and when it is infinite
    model, average = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    stops = pytest.raises(fastcheck.OverflowDetected)
    with fastcheck.install(model, average, level=level, watch=False), stops as stop:
        for _ in range(200):
            x = torch.ones(8, 4)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            for old, new in zip(average.parameters(), model.parameters()):
                old.mul_(3.0).sub_(2.0 * new.detach())
            average(x)
    assert "the sign and the decay of an average of weights" in said(stop.value)
    assert "lower the learning rate" not in said(stop.value)


def test_a_root_of_what_float16_does_not_hold() -> None:
    """The root keeps its result alone."""
    model = torch.nn.Linear(8, 512).half()
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.full((4, 8), 40.0, dtype=torch.float16))
        norms = y.pow(2).sum(-1).sqrt()
        norms.float().mean().backward()
    assert "try 1. What was given to SqrtBackward0 left the range of float16" in said(stop.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_running_variance_that_grows(dtype: torch.dtype) -> None:
    """In float32 that is data that grows from step to step; float16 ends at the square of 256."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, watch=False), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(60):
            optimizer.zero_grad()
            x = torch.randn(16, 8) * 1.5 ** (step if dtype is torch.float16 else 2 * step)
            model(x.to(dtype)).float().square().mean().backward()
            optimizer.step()
    assert stop.value.culprit.site.label == "running_var"
    first = (
        "keep this norm and its input in float32" if dtype is torch.float16 else "look at the data"
    )
    assert first in said(stop.value).partition("try 1. ")[2].partition(" 2. ")[0]


class Scores(torch.nn.Module):
    """Attention scores in float16 that go on in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.half()
        return (half @ half.T).float().softmax(-1) @ x


def test_a_product_in_float16_that_goes_on_in_float32() -> None:
    model = torch.nn.Sequential(Scores(), torch.nn.Linear(4, 2))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.full((8, 4), 300.0)).sum().backward()
    first = said(stop.value).partition("try 1. ")[2].partition(" 2. ")[0]
    assert "mm left the range of float16, which ends at 65,504" in first
    assert "float32 or bfloat16" in first and "range of float32" not in first


def stopped_by(loss: torch.Tensor) -> str:
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        loss.backward()
    return said(stop.value)


def test_a_difference_of_infinities() -> None:
    """The node of a difference keeps nothing; that of exp has a NaN of a NaN alone."""
    model = torch.nn.Linear(4, 4)
    hidden = torch.full((8, 4), True)
    with fastcheck.install(model):
        scores = model(torch.rand(8, 4)).masked_fill(hidden, -math.inf)
        logs = scores - scores.logsumexp(-1, keepdim=True)
        text = stopped_by(logs.sum())
    assert "why SubBackward0" in text
    assert "try 1. self holds 32 -Inf, of which sub makes NaN" in text and "masked whole" in text
    with fastcheck.install(model):
        rows = model(torch.rand(8, 4)).sum(-1) + torch.full((8,), -math.inf)
        best = torch.stack([rows, rows]).max
        text = stopped_by((torch.full((8,), -math.inf) - best(0).values).exp().sum())
    assert "why SubBackward0" in text and "8 8 0" in text
    assert "try 1. SubBackward0 makes NaN of Inf - Inf alone" in text


def test_the_line_of_a_known_operator_that_keeps_nothing() -> None:
    model = torch.nn.Linear(4, 4)
    with fastcheck.install(model):
        counts = torch.zeros(4)
        logits = model(torch.rand(8, 4)) - torch.log(counts / 8)
        text = stopped_by(torch.nn.functional.cross_entropy(logits, torch.arange(8) % 4))
    assert "variable logits, assigned at" in text
    assert "try 1. Look at the line that assigns it: log(0) is -Inf" in text


def test_a_singular_system() -> None:
    class Solve(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_ex(x @ x.mT, torch.ones(len(x), 4, 1))[0].squeeze(-1)

    model = torch.nn.Sequential(Solve(), torch.nn.Linear(4, 2))
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        model(torch.ones(3, 4, 2)).sum().backward()
    assert "where the matrix is singular or nearly so" in said(stop.value)
