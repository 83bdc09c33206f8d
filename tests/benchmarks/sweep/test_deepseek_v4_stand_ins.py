# SPDX-License-Identifier: Apache-2.0
"""The stand-ins compute what vLLM's torch reference computes."""

import os
import subprocess
import sys

import pytest
import torch

import vllm
from benchmarks.sweep import deepseek_v4_kernels as kernels
from benchmarks.sweep import deepseek_v4_stand_ins as stand_ins
from benchmarks.sweep.arms import Arm
from benchmarks.sweep.checkpoints import DEEPSEEK_V4, LLM_ARGUMENTS, write_preset
from tests.helpers.paths import REPOSITORY

TOKENS, COPIES, HIDDEN = 5, 4, 96
EPS = (1e-6, 1e-6, 1e-6, 2.0, 20)


@pytest.fixture
def case():
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    rows = COPIES * (COPIES + 2)
    return {
        "residual": normal(TOKENS, COPIES, HIDDEN).bfloat16(),
        "fn": normal(rows, COPIES * HIDDEN) * 0.1,
        "scale": normal(3),
        "base": normal(rows),
        "x": normal(TOKENS, HIDDEN).bfloat16(),
        "weight": normal(HIDDEN).bfloat16(),
    }


def _pre(function, case, **kwargs):
    return function(
        case["residual"], case["fn"], case["scale"], case["base"], *EPS, **kwargs
    )


def test_pre_and_post_equal_the_torch_reference(case):
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    want, got = _pre(mhc_pre_torch, case), _pre(kernels.mhc_pre, case)
    for a, b in zip(want, got, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(b.float(), a.float(), atol=2e-2, rtol=1e-2)
    # The weights themselves are float32.
    torch.testing.assert_close(got[0], want[0].float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[1], want[1].float(), atol=1e-5, rtol=1e-4)
    after = mhc_post_torch(case["x"], case["residual"], want[0], want[1])
    ours = kernels.mhc_post(case["x"], case["residual"], got[0], got[1])
    torch.testing.assert_close(ours.float(), after.float(), atol=3e-2, rtol=1e-2)


def test_norm_broadcast_fusion_and_head_are_what_their_parts_make(case):
    post, comb, out = _pre(kernels.mhc_pre, case)
    normed = _pre(kernels.mhc_pre, case, norm_weight=case["weight"])[2].float()
    rms = torch.rsqrt(out.float().square().mean(-1, keepdim=True) + 1e-6)
    want = out.float() * rms * case["weight"].float()
    torch.testing.assert_close(normed, want, atol=4e-2, rtol=2e-2)

    single = {**case, "residual": case["residual"][:, 0]}
    spread = single["residual"].unsqueeze(1).expand(-1, COPIES, -1).contiguous()
    got = _pre(kernels.mhc_pre_broadcast, single)
    assert torch.equal(got[0], spread)
    for a, b in zip(
        got[1:], _pre(kernels.mhc_pre, {**case, "residual": spread}), strict=True
    ):
        assert torch.equal(a, b)

    tail = (case["fn"], case["scale"], case["base"], *EPS)
    fused = kernels.mhc_fused_post_pre(case["x"], case["residual"], post, comb, *tail)
    after = kernels.mhc_post(case["x"], case["residual"], post, comb)
    assert torch.equal(fused[0], after)
    assert torch.equal(fused[3], _pre(kernels.mhc_pre, {**case, "residual": after})[2])

    fn, base = case["fn"][:COPIES], case["base"][:COPIES]
    head = kernels.hc_head(case["residual"], fn, case["scale"][:1], base, 1e-6, 1e-6)
    flat = case["residual"].flatten(1).float()
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    share = torch.sigmoid(flat @ fn.t() * norm * case["scale"][0] + base) + 1e-6
    want = (share[:, :, None] * case["residual"].float()).sum(1)
    torch.testing.assert_close(head.float(), want, atol=3e-2, rtol=1e-2)


@pytest.mark.skipif(
    vllm.__version__.startswith("0.32"),
    reason="0.32 reads another form of this config; CI runs this on the GPU release",
)
@pytest.mark.parametrize(
    ("arm", "num_layers"), [("fixed5", 0), ("upstream5", 12), ("capacity5", 0)]
)
def test_vllm_takes_the_preset_with_its_draft_inside(tmp_path, arm, num_layers):
    target, draft = write_preset(tmp_path, DEEPSEEK_V4, 5, num_layers)
    spec = Arm.parse(arm).speculative_config(draft, 5)
    assert draft is None and "model" not in spec
    # A process of its own: the stand-ins stay where they are put.
    code = f"""
from benchmarks.sweep.deepseek_v4_stand_ins import install
assert install() == install()
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(
    model={target!r}, speculative_config={spec!r}, max_model_len=4096,
    load_format="dummy", skip_tokenizer_init=True,
    compilation_config={{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    **{LLM_ARGUMENTS[DEEPSEEK_V4]!r},
).create_engine_config()
draft = config.speculative_config.draft_model_config
assert draft.architectures == ["DSparkDraftModel"], draft.architectures
assert config.speculative_config.num_speculative_tokens == 5
assert config.model_config.hf_text_config.num_hidden_layers == {num_layers or 4}
"""
    environ = {"VLLM_DSPARK_CPU_REHEARSAL": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_kernel_without_a_stand_in_says_so():
    with pytest.raises(RuntimeError, match="without a stand-in"):
        stand_ins._Module("m").some_kernel(1)
