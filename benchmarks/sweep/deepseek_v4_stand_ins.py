# SPDX-License-Identifier: Apache-2.0
"""What a DeepSeek-V4 engine needs on a host without two optional packages.

* Without tilelang: the hyper-connection glue (mHC) as three Triton kernels and one
  float32 matrix product (``deepseek_v4_kernels.py``).
* Without CUTLASS DSL: the compressor of head size 512 as vLLM's own Triton kernel,
  which writes the same fp8_ds_mla bytes.

FlashMLA's sparse attention, the DeepGEMM indexer and the FP8 matrix products stay as
they are. Figures of an engine with stand-ins must say so. ``install`` also makes
dummy weights that keep activations finite: unit norms, 1/sqrt(fan-in) elsewhere.
"""

import importlib.util
import sys
import types
from typing import Any

import torch

from benchmarks.sweep.deepseek_v4_kernels import (
    hc_head,
    mhc_fused_post_pre,
    mhc_post,
    mhc_pre,
    mhc_pre_broadcast,
)

_KERNELS = "vllm.model_executor.kernels.mhc.tilelang_kernels"
_COMPRESSOR = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
_USERS = tuple(
    f"vllm.models.deepseek_v4.nvidia.{name}" for name in ("model", "dspark", "mtp")
)


class _Unused:
    """A name of a missing package that only warm-up touches."""

    def register_warmup(self, *args: Any, **kwargs: Any) -> None:
        """Warm nothing up."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a kernel without a stand-in was called")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Unused()
        setattr(self, name, found)
        return found


class _TritonCompressor(_Unused):
    def __call__(
        self,
        *,
        store_full_kv: bool = False,
        store_full_fp8: bool = False,
        fp8_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache

        if store_full_kv:
            raise RuntimeError("the compressor's stand-in needs kv_cache_dtype fp8")
        fused_compress_quant_cache.compress_norm_rope_store_triton(**kwargs)


def _install_mhc() -> None:
    stub = _Module(_KERNELS)
    vars(stub)["compute_num_split"] = lambda *args, **kwargs: 1
    sys.modules[_KERNELS] = stub
    import vllm.model_executor.kernels.mhc.tilelang as kernels

    ours = {
        "mhc_pre_tilelang": mhc_pre,
        "mhc_pre_broadcast_tilelang": mhc_pre_broadcast,
        "mhc_post_tilelang": mhc_post,
        "mhc_fused_post_pre_tilelang": mhc_fused_post_pre,
        "hc_head_fused_kernel_tilelang": hc_head,
    }
    for module in (kernels, *(sys.modules.get(name) for name in _USERS)):
        for name, function in ours.items():
            if module is not None and hasattr(module, name):
                setattr(module, name, function)


def _install_compressor() -> None:
    stub = _Module(_COMPRESSOR)
    vars(stub)["_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL"] = _TritonCompressor()
    sys.modules[_COMPRESSOR] = stub


def _fill(param: torch.Tensor, name: str, seed: int) -> bool:
    """Fill one dummy weight; return False to leave it to vLLM."""
    wide = param.dtype in (torch.bfloat16, torch.float32)
    if "scale" in name and param.dtype == torch.float32 and param.ndim >= 2:
        # Block scales [.., N / 128, K / 128] of weights drawn from U(-1, 1).
        param.data.fill_(1.73 / (param.shape[-1] * 128) ** 0.5)
    elif name == "weight" and wide and param.ndim == 1:
        param.data.fill_(1.0)
    elif name == "weight" and wide:
        draw = torch.Generator(device=param.device).manual_seed(seed)
        param.data.normal_(0.0, param.shape[-1] ** -0.5, generator=draw)
    else:
        return False
    return True


def _install_weights() -> None:
    from vllm.model_executor.model_loader import dummy_loader

    original = dummy_loader.initialize_single_dummy_weight
    count = 0

    def initialize(
        param: torch.Tensor,
        low: float | None = None,
        high: float | None = None,
        seed: int = 1234,
        name: str = "",
    ) -> None:
        nonlocal count
        count += 1
        seed += count  # vLLM gives every weight of a shape the same draws
        given = getattr(param, "dummy_weight_value", None) is not None
        left = given or param.device.type == "meta"
        if left or not _fill(param, name.rsplit(".", 1)[-1], seed):
            original(param, low, high, seed=seed, name=name)

    dummy_loader.initialize_single_dummy_weight = initialize


_installed: list[str] = []


def install() -> list[str]:
    """Put the stand-ins in place, once, before a DeepSeek-V4 model is imported.

    Returns:
        The parts for which a stand-in is used: none where the packages exist.
    """
    if _installed:
        return _installed
    if importlib.util.find_spec("tilelang") is None:
        _install_mhc()
        _installed.append("mHC (Triton)")
    if importlib.util.find_spec("cutlass") is None:
        _install_compressor()
        _installed.append("compressor (Triton)")
    _install_weights()
    _installed.append("dummy weights")
    return _installed
