# SPDX-License-Identifier: Apache-2.0
"""The figures of a batch, against counting request by request."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.capacity_cases import K, make_batch
from vllm.v1.worker.gpu.spec_decode.dspark.batch_facts import (
    BatchFacts,
    count_decodes,
    gather_facts,
)

WIDTHS = st.one_of(
    st.lists(st.integers(1, K), min_size=1, max_size=12),
    st.tuples(st.integers(0, K), st.integers(1, 12)).map(lambda t: [t[0]] * t[1]),
)


@given(drafts=WIDTHS, prompts=st.lists(st.integers(0, 9), max_size=4), data=st.data())
def test_figures_equal_counting_request_by_request(drafts, prompts, data):
    widths = [*drafts, *[0] * len(prompts)]
    size = len(widths)
    others = data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    batch = make_batch(
        widths, non_drafts=others, prefilling=[*[0] * len(drafts), *prompts]
    )
    facts = gather_facts(batch, count_decodes(batch))
    assert facts == BatchFacts(
        num_reqs=size,
        num_decodes=len(drafts) + prompts.count(0),
        num_drafts=sum(widths),
        num_verifying=sum(width > 0 for width in widths),
        width=widths[0] if len(set(widths)) == 1 else -1,
        num_non_drafts=sum(others),
    )
    assert facts.decode_only == (not any(prompts))
    assert all(isinstance(f, int) and not isinstance(f, np.integer) for f in facts)


def test_a_batch_that_nobody_drafted_for_is_of_width_zero():
    batch = make_batch(None, non_drafts=[1, 5], prefilling=[0, 9])
    facts = gather_facts(batch, count_decodes(batch))
    assert facts == BatchFacts(2, 1, 0, 0, 0, 6)
    assert not facts.decode_only
