# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's hyper-connections (mHC) in Triton, called as vLLM's kernels are.

Source: the mathematics of ``vllm/model_executor/kernels/mhc/torch.py`` at v0.33.0,
which tests/benchmarks/sweep/test_deepseek_v4_stand_ins.py compares with.
"""

from typing import Any

import torch

from vllm.triton_utils import tl, triton


@triton.jit
def _mix_kernel(
    mix_ptr,  # [T, HC * (HC + 2)] float32
    square_ptr,  # [T] float32, sums of squares
    scale_ptr,  # [3] float32
    base_ptr,  # [HC * (HC + 2)] float32
    pre_ptr,  # [T, HC] float32, out
    post_ptr,  # [T, HC] float32, out
    comb_ptr,  # [T, HC, HC] float32, out
    width,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    HC: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """Turn one token's mixing logits into its three sets of weights."""
    token = tl.program_id(0)
    ROW: tl.constexpr = HC * (HC + 2)
    norm = 1.0 / tl.sqrt(tl.load(square_ptr + token) / width + rms_eps)
    i = tl.arange(0, HC)
    row = mix_ptr + token * ROW
    pre = tl.load(row + i) * norm * tl.load(scale_ptr) + tl.load(base_ptr + i)
    tl.store(pre_ptr + token * HC + i, 1.0 / (1.0 + tl.exp(-pre)) + pre_eps)
    post = tl.load(row + HC + i) * norm * tl.load(scale_ptr + 1)
    post += tl.load(base_ptr + HC + i)
    tl.store(post_ptr + token * HC + i, post_mult / (1.0 + tl.exp(-post)))
    ij = i[:, None] * HC + i[None, :]
    comb = tl.load(row + 2 * HC + ij) * norm * tl.load(scale_ptr + 2)
    comb += tl.load(base_ptr + 2 * HC + ij)
    comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
    comb = comb / tl.sum(comb, axis=1)[:, None] + sinkhorn_eps
    comb = comb / (tl.sum(comb, axis=0)[None, :] + sinkhorn_eps)
    for _ in range(REPEAT - 1):
        comb = comb / (tl.sum(comb, axis=1)[:, None] + sinkhorn_eps)
        comb = comb / (tl.sum(comb, axis=0)[None, :] + sinkhorn_eps)
    tl.store(comb_ptr + token * HC * HC + ij, comb)


@triton.jit
def _collapse_kernel(
    x_ptr,  # [T, HC, hidden]
    x_token_stride,
    x_copy_stride,
    pre_ptr,  # [T, HC] float32
    weight_ptr,  # [hidden], read where NORM
    out_ptr,  # [T, hidden]
    hidden,
    norm_eps,
    HC: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one token's copies by their weights, then norm."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < hidden
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(HC):
        x = x_ptr + token * x_token_stride + j * x_copy_stride + col
        share = tl.load(pre_ptr + token * HC + j)
        acc += share * tl.load(x, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        acc *= 1.0 / tl.sqrt(tl.sum(acc * acc, axis=0) / hidden + norm_eps)
        acc *= tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden + col, out, mask=inside)


@triton.jit
def _post_kernel(
    x_ptr,  # [T, hidden]
    residual_ptr,  # [T, HC, hidden]
    post_ptr,  # [T, HC] float32
    comb_ptr,  # [T, HC, HC] float32
    out_ptr,  # [T, HC, hidden]
    hidden,
    HC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one copy of one token: its layer's output plus the mixed residuals."""
    token, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, BLOCK)
    inside = col < hidden
    x = tl.load(x_ptr + token * hidden + col, mask=inside, other=0.0)
    acc = tl.load(post_ptr + token * HC + j) * x.to(tl.float32)
    for i in tl.static_range(HC):
        share = tl.load(comb_ptr + token * HC * HC + i * HC + j)
        residual = residual_ptr + (token * HC + i) * hidden + col
        acc += share * tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * HC + j) * hidden + col, out, mask=inside)


def _collapse(
    x: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    tokens, copies, hidden = x.shape
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
    if tokens:
        _collapse_kernel[(tokens,)](
            x,
            x.stride(0),
            x.stride(1),
            pre,
            pre if weight is None else weight,
            out,
            hidden,
            eps,
            HC=copies,
            NORM=weight is not None,
            BLOCK=triton.next_power_of_2(hidden),
            num_warps=8,
        )
    return out


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return post weights, residual mixing weights and a layer's input.

    Args:
        residual: Copies of each token. Shape [..., HC, hidden], bfloat16.
        fn: Shape [HC * (HC + 2), HC * hidden], float32.
        hc_scale: Shape [3], float32.
        hc_base: Shape [HC * (HC + 2)], float32.
        rms_eps: Of the norm of all copies.
        hc_pre_eps: Added to pre weights.
        hc_sinkhorn_eps: Of the alternating normalisation.
        hc_post_mult_value: Largest post weight.
        sinkhorn_repeat: Rounds of that normalisation, >= 1.
        n_splits: Not read.
        norm_weight: RMS norm of the result; None leaves it as it is.
        norm_eps: Of that norm.

    Returns:
        Shapes [..., HC, 1], [..., HC, HC], float32, and [..., hidden], bfloat16.
    """
    copies, hidden = residual.shape[-2:]
    outer = residual.shape[:-2]
    x = residual.reshape(-1, copies, hidden)
    tokens, device = x.shape[0], x.device
    flat = x.view(tokens, copies * hidden).float()
    mix = (flat @ fn.t()).contiguous()
    squares = flat.square().sum(-1)
    pre = torch.empty(tokens, copies, device=device)
    post = torch.empty(tokens, copies, device=device)
    comb = torch.empty(tokens, copies * copies, device=device)
    if tokens:
        _mix_kernel[(tokens,)](
            mix,
            squares,
            hc_scale,
            hc_base,
            pre,
            post,
            comb,
            copies * hidden,
            rms_eps,
            hc_pre_eps,
            hc_sinkhorn_eps,
            hc_post_mult_value,
            HC=copies,
            REPEAT=sinkhorn_repeat,
            num_warps=1,
        )
    out = _collapse(x, pre, norm_weight, norm_eps)
    return (
        post.view(*outer, copies, 1),
        comb.view(*outer, copies, copies),
        out.view(*outer, hidden),
    )


def mhc_pre_broadcast(
    residual: torch.Tensor,
    fn: torch.Tensor,
    *args: Any,
    fn_broadcast: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the copies of single rows, then what ``mhc_pre`` makes of them.

    Args:
        residual: Shape [T, hidden], bfloat16.
        fn: Shape [HC * (HC + 2), HC * hidden], float32.
        args: See ``mhc_pre``.
        fn_broadcast: Not read.
        kwargs: See ``mhc_pre``.
    """
    copies = fn.shape[1] // residual.shape[-1]
    spread = residual.unsqueeze(1).expand(-1, copies, -1).contiguous()
    return spread, *mhc_pre(spread, fn, *args, **kwargs)


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """Return the copies after a layer.

    Args:
        x: The layer's output. Shape [..., hidden], bfloat16.
        residual: Copies before it. Shape [..., HC, hidden], bfloat16.
        post_layer_mix: Shape [..., HC, 1], float32.
        comb_res_mix: Shape [..., HC, HC], float32.
    """
    copies, hidden = residual.shape[-2:]
    out = torch.empty_like(residual)
    tokens = residual.numel() // (copies * hidden)
    if tokens:
        _post_kernel[(tokens, copies)](
            x.contiguous(),
            residual.contiguous(),
            post_layer_mix.contiguous(),
            comb_res_mix.contiguous(),
            out,
            hidden,
            HC=copies,
            BLOCK=triton.next_power_of_2(hidden),
            num_warps=8,
        )
    return out


def mhc_fused_post_pre(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    *args: Any,
    tile_n: int = 1,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """Return ``mhc_post`` of one layer, then ``mhc_pre`` of the next.

    Args:
        x: See ``mhc_post``, as the next three.
        residual: See there.
        post_layer_mix: See there.
        comb_res_mix: See there.
        args: See ``mhc_pre``, from ``fn`` on.
        tile_n: Not read.
        kwargs: See ``mhc_pre``.
    """
    after = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    return after, *mhc_pre(after, *args, **kwargs)


def hc_head(
    hs_flat: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Return one row per token from its copies.

    Args:
        hs_flat: Shape [T, HC, hidden], bfloat16.
        fn: Shape [HC, HC * hidden], float32.
        hc_scale: Shape [1], float32.
        hc_base: Shape [HC], float32.
        rms_eps: Of the norm of all copies.
        hc_eps: Added to the weights.
    """
    flat = hs_flat.flatten(1).float()
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    pre = torch.sigmoid((flat @ fn.t()) * norm * hc_scale + hc_base) + hc_eps
    return _collapse(hs_flat.contiguous(), pre.contiguous(), None, 0.0)
