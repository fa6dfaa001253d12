"""The advice on an operator fits the values that it read and made."""

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
    GIVEN_NUMBER,
    KNOWN_ALONE,
)
from fastcheck.record.format import Verdict
from fastcheck.report.advice.choose import advise
from fastcheck.report.stop_report import MadeBy
from support.operator_reports import WEIGHT, ZERO, advice_of, of, operator_report, said
from support.records import record_builder as build
from support.reports import all_reports

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
    "i0 of 95": (
        operator_report("aten.i0", {"self": of(1.0, 95.0)}, posinf_count=1),
        "self reaches 95 in magnitude: i0 grows as exp(), beyond 3.40e+38 here. Its logarithm",
    ),
    "a mean over a segment of nothing": (
        operator_report("aten.segment_reduce", {"data": of()}, nan_count=4),
        "A segment of no elements, as far as is known: the mean of none is 0/0.",
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
    "kl_div of logarithms": (
        operator_report(
            "aten.xlogy.Tensor",
            dict.fromkeys(
                ("self (aten._log_softmax)", "other (aten._log_softmax)"), of(-2.4, -0.9)
            ),
            nan_count=8,
        ),
        "pass log_target=True. If not, give it probabilities",
    ),
    "a mask that is written": (
        operator_report("aten.masked_fill.Scalar", {"self": of()}, neginf_count=2),
        "aten.masked_fill.Scalar wrote infinities, as a mask has",
    ),
    "a mask that is passed on": (
        operator_report(
            "aten.sub.Tensor", {"self": of(), "other": of(posinf_count=2)}, neginf_count=2
        ),
        "aten.sub.Tensor was given infinities, as a mask has",
    ),
    "a sum in float16 times 0": (
        operator_report(
            "aten.mul.Tensor",
            {"self": of(0.0, 0.0, numel=1, zero_count=1)},
            dtype="float16",
            numel=1,
            nan_count=1,
        ),
        "a factor that was divided by 0, a sum beyond 65,504",
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["aten.rsqrt", "aten.div.Tensor"])
def test_an_eps_that_float16_rounds_to_0(op: str, dtype: str) -> None:
    inputs = {"self": ZERO, "other (aten.add)": of(0.0, 0.0, dtype=dtype, zero_count=8)}
    inputs = {"self": inputs["other (aten.add)"]} if op == "aten.rsqrt" else inputs
    told = advice_of(operator_report(op, inputs, dtype=dtype, posinf_count=8))
    assert ("In float16 an eps below 3e-8 is 0. Add an eps" in told) == (dtype == "float16")


def test_a_value_on_the_border_of_a_support() -> None:
    model = torch.nn.Linear(4, 2)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        shape = model(torch.ones(3, 4)).square() + 2
        beta = torch.distributions.Beta(shape[:, 0], shape[:, 1], validate_args=False)
        loss = beta.log_prob(torch.tensor([0.5, 1.0, 0.2])).mean()
        loss.backward()
    first = advise(stop.value.report)[0]
    assert "log_prob() was given a value on the border of the distribution's support" in first.text


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


def test_growth_of_a_gradient_makes_no_zero_of_a_root() -> None:
    read = {"self": of(), "other": ZERO}
    report = operator_report(
        "aten.div.Tensor", read, backward=True, ran="aten.sqrt", posinf_count=2
    )
    for bad, is_root in ((2, True), (3, False)):
        what = build.record(posinf_count=bad, step=41)
        trend = np.stack([*build.grown("float32", 1.0, 50.0, 4, 4), what])
        culprit = replace(report.culprit, record=what)
        told = advice_of(replace(report, trend=trend, culprit=culprit))
        assert ("The derivative of sqrt is infinite at 0" in told) is is_root
        assert told.startswith("The derivative of sqrt") is is_root


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


def test_four_items_at_most() -> None:
    reports = [*all_reports(), *(report for report, _ in OPERATORS.values())]
    assert max(len(advise(report)) for report in reports) <= 4
