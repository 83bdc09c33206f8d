# SPDX-License-Identifier: Apache-2.0
"""The kernel that refits the confidence calibration from the graded rows.

The same steps as :func:`.sts_fit.fit_calibration`, in float32, one program a class
with all its rows in registers; rare, so one launch of two programs may take a while.

Invariants (pinned by tests/.../dspark/test_sts_kernels.py and test_kernel_registry.py):
  * Equals its reference (:mod:`.sts_reference`); no atomics.
  * Without rows the calibration keeps its bits.
"""

import math

import torch
import triton
import triton.language as tl

from vllm.v1.worker.gpu.spec_decode.dspark import sts_fit
from vllm.v1.worker.gpu.spec_decode.dspark.sts_kernels import (
    bend_term,
    runs_sts_kernels,
    sigmoid,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import (
    RING_ROWS,
    DraftRing,
    fit_confidences_reference,
)

_FIT_WARPS = 16
_LOG2_DECAY = math.log2(sts_fit.DECAY)


@triton.jit
def _fit_confidences_kernel(
    ring_logits_ptr,  # [2, RING, num_steps]
    ring_accepted_ptr,  # [2, RING]
    ring_verified_ptr,  # [2, RING]
    num_rows_ptr,  # [2]
    prior_ptr,  # [2, 3, num_steps]
    calibration_ptr,  # [2, 3, num_steps], start, then result
    num_steps,
    log2_decay,
    scale_prior_info,
    bias_prior_info,
    bend_prior_info,
    RING: tl.constexpr,
    NUM_ITERATIONS: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    MAX_BEND: tl.constexpr,
    MAX_BIAS_STEP: tl.constexpr,
    MAX_BEND_STEP: tl.constexpr,
    MAX_SCALE_STEP: tl.constexpr,
):
    """Fit one class, left to right.

    Grid: (2,), a program per class; its rows stay in registers.
    """
    group = tl.program_id(0)
    rows = tl.arange(0, RING)
    newest = tl.load(num_rows_ptr + group) - 1
    age = ((newest - rows) & (RING - 1)).to(tl.int32)
    has_row = age <= newest
    accepted = tl.load(ring_accepted_ptr + group * RING + rows)
    verified = tl.where(has_row, tl.load(ring_verified_ptr + group * RING + rows), 0)
    weight = tl.exp2(age.to(tl.float32) * log2_decay)
    survival = tl.full([RING], 1.0, tl.float32)
    logits_at = ring_logits_ptr + (group * RING + rows) * num_steps
    table = 3 * group * num_steps
    for step in range(num_steps):
        known = verified > step
        z = tl.load(logits_at + step, mask=known, other=0.0)
        outcome = (accepted > step).to(tl.float32)
        w = tl.where(known, weight, 0.0)
        scale_at = table + step
        bias_at = scale_at + num_steps
        bend_at = bias_at + num_steps
        prior_scale = tl.load(prior_ptr + scale_at)
        prior_bias = tl.load(prior_ptr + bias_at)
        prior_bend = tl.load(prior_ptr + bend_at)
        scale = tl.load(calibration_ptr + scale_at)
        bias = tl.load(calibration_ptr + bias_at)
        bend = tl.load(calibration_ptr + bend_at)
        for _ in range(NUM_ITERATIONS):
            u = scale * z + bias
            of_bend = bend_term(u)
            g = u + bend * of_bend
            prob = survival * sigmoid(g)
            # (1 - s) / (1 - S s), in a form that stays in (0, 1] as both vanish.
            miss = sigmoid(-g)
            ratio = miss / tl.maximum(1.0 - survival + survival * miss, 1e-12)
            slope = w * (prob - outcome) * ratio
            curve = w * prob * miss * ratio
            # How g changes with bias and scale; 2 sigmoid(u) - 1 = tanh(u / 2).
            of_bias = 1.0 + bend * (2.0 * sigmoid(u) - 1.0)
            of_scale = z * of_bias
            g_scale = tl.sum(slope * of_scale, axis=0)
            g_scale += scale_prior_info * (scale - prior_scale)
            g_bias = tl.sum(slope * of_bias, axis=0)
            g_bias += bias_prior_info * (bias - prior_bias)
            g_bend = tl.sum(slope * of_bend, axis=0)
            g_bend += bend_prior_info * (bend - prior_bend)
            h_bb = tl.sum(curve * of_bias * of_bias, axis=0) + bias_prior_info
            h_sb = tl.sum(curve * of_scale * of_bias, axis=0)
            h_rb = tl.sum(curve * of_bend * of_bias, axis=0)
            h_ss = tl.sum(curve * of_scale * of_scale, axis=0) + scale_prior_info
            h_rs = tl.sum(curve * of_bend * of_scale, axis=0)
            h_rr = tl.sum(curve * of_bend * of_bend, axis=0) + bend_prior_info
            # Eliminate bias, then scale. A determinant of the three would cancel in
            # float32; this loses far less than the prior's part of a diagonal.
            scale_on_bias = h_sb / h_bb
            bend_on_bias = h_rb / h_bb
            h_ss = h_ss - scale_on_bias * h_sb
            h_rs = h_rs - scale_on_bias * h_rb
            g_scale = g_scale - scale_on_bias * g_bias
            h_rr = h_rr - bend_on_bias * h_rb - h_rs / h_ss * h_rs
            g_bend = g_bend - bend_on_bias * g_bias - h_rs / h_ss * g_scale
            # A bend at its bound stays there, and the others must not count on more.
            wanted = bend - g_bend / h_rr
            d_bend = bend - tl.minimum(tl.maximum(wanted, -MAX_BEND), MAX_BEND)
            d_scale = (g_scale - h_rs * d_bend) / h_ss
            d_bias = (g_bias - h_sb * d_scale - h_rb * d_bend) / h_bb
            limit = tl.maximum(
                tl.abs(d_bias) / MAX_BIAS_STEP,
                tl.abs(d_scale) / (MAX_SCALE_STEP * scale),
            )
            limit = tl.maximum(limit, tl.abs(d_bend) / MAX_BEND_STEP)
            limit = tl.maximum(limit, 1.0)
            scale = tl.minimum(
                tl.maximum(scale - d_scale / limit, MIN_SCALE), MAX_SCALE
            )
            bias = tl.minimum(tl.maximum(bias - d_bias / limit, -MAX_BIAS), MAX_BIAS)
            bend = tl.minimum(tl.maximum(bend - d_bend / limit, -MAX_BEND), MAX_BEND)
        tl.store(calibration_ptr + scale_at, scale)
        tl.store(calibration_ptr + bias_at, bias)
        tl.store(calibration_ptr + bend_at, bend)
        u = scale * z + bias
        survival = tl.where(
            known, survival * sigmoid(u + bend * bend_term(u)), survival
        )


def fit_confidences(
    ring: DraftRing, prior: torch.Tensor, *, calibration_out: torch.Tensor
) -> None:
    """Refit scales, biases and bends to the graded rows, in one launch.

    Args:
        ring: Graded rows.
        prior: What the fit falls back on. Shape [2, 3, K], float32.
        calibration_out: Where the search begins and where the result goes. Shape
            [2, 3, K], float32, contiguous.

    Source: the steps of ``sts_fit.fit_calibration``.
    """
    if not runs_sts_kernels(calibration_out.device):
        fit_confidences_reference(ring, prior, calibration_out=calibration_out)
        return
    _fit_confidences_kernel[(calibration_out.shape[0],)](
        ring.logits,
        ring.accepted,
        ring.verified,
        ring.num_rows,
        prior,
        calibration_out,
        calibration_out.shape[2],
        _LOG2_DECAY,
        sts_fit.PRIOR_SCALE_INFORMATION,
        sts_fit.PRIOR_BIAS_INFORMATION,
        sts_fit.PRIOR_BEND_INFORMATION,
        RING=RING_ROWS,
        NUM_ITERATIONS=sts_fit.NUM_ITERATIONS,
        MIN_SCALE=sts_fit.MIN_SCALE,
        MAX_SCALE=sts_fit.MAX_SCALE,
        MAX_BIAS=sts_fit.MAX_BIAS,
        MAX_BEND=sts_fit.MAX_BEND,
        MAX_BIAS_STEP=sts_fit.MAX_BIAS_STEP,
        MAX_BEND_STEP=sts_fit.MAX_BEND_STEP,
        MAX_SCALE_STEP=sts_fit.MAX_SCALE_STEP,
        num_warps=_FIT_WARPS,
    )
