# SPDX-License-Identifier: Apache-2.0
"""Attention, sampling and norm pieces that the CPU rehearsal needs.

CPU attention plans its work from tensor *values* when metadata is built. A graph is
captured with dummy values, so the plan must be made again inside each replay.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from vllm.platforms.dspark_rehearsal.graphs import replay_serial
from vllm.v1.attention.backend import AttentionCGSupport

# An imitated graph replans attention, so any batch shape may be captured.
GRAPH_SUPPORT = AttentionCGSupport.ALWAYS
# The top-k/top-p kernel fails in the interpreter; vLLM then takes its torch code.
TOP_K_TOP_P_HAS_TRITON = False


def wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make metadata remember how to plan itself again.

    Args:
        original: ``CPUAttentionMetadataBuilder.build``.

    Returns:
        The replacement; its metadata carries ``rehearsal_plan``, which returns a
        fresh ``scheduler_metadata`` from the present values of the same tensors.
    """

    @functools.wraps(original)
    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        metadata = original(self, common_prefix_len, common_attn_metadata, fast_build)
        metadata.rehearsal_plan = functools.partial(
            original, self, common_prefix_len, common_attn_metadata, fast_build
        )
        metadata.rehearsal_serial = 0
        return metadata

    return build


def wrap_forward(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replan once per replay and keep rows that no request owns finite.

    Args:
        original: ``CPUAttentionBackendImpl.forward``.

    Returns:
        The replacement, with the same parameters and result.
    """

    @functools.wraps(original)
    def forward(
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        serial = replay_serial()
        if attn_metadata is not None and serial:
            if attn_metadata.rehearsal_serial != serial:
                fresh = attn_metadata.rehearsal_plan()
                attn_metadata.scheduler_metadata = fresh.scheduler_metadata
                attn_metadata.rehearsal_serial = serial
            # The kernel leaves padding rows as they were, here uninitialised.
            output.zero_()
        return original(
            self,
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            *args,
            **kwargs,
        )

    return forward


class InterpreterLibdevice:
    """The libdevice functions used by vLLM's V2 kernels, for the interpreter."""

    @staticmethod
    def log1p(x: tl.tensor) -> tl.tensor:
        """Return log(1 + x) elementwise; x is a float tensor of the interpreter."""
        with np.errstate(all="ignore"):
            values = np.log1p(x.handle.data)
        return tl.tensor(TensorHandle(values, x.handle.dtype), x.type)


def wrap_normalize_context_k(
    original: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Give each draft layer its own k_norm weight on the context keys.

    vLLM passes one [num_layers, head_dim] weight to ``rms_norm``; the CPU kernel
    reads its first row only, so later layers would be normed with layer 0's.

    Args:
        original: ``DFlashQwen3Model._normalize_context_k``.

    Returns:
        The replacement: keys [num_layers, num_tokens, num_kv_heads, head_dim] in,
        a new tensor of that shape out.
    """

    @functools.wraps(original)
    def normalize_context_k(self: Any, all_k: torch.Tensor) -> torch.Tensor:
        weights = self._k_norm_weights
        if weights.dim() == 1:
            return original(self, all_k)
        return torch.stack(
            [
                _rms_norm(keys, weight, self._rms_norm_eps)
                for keys, weight in zip(all_k, weights, strict=True)
            ]
        )

    return normalize_context_k


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from vllm import _custom_ops as ops

    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, eps)
    return out
