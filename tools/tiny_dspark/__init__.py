# SPDX-License-Identifier: Apache-2.0
"""Train the tiny Qwen3 target and DSpark draft that the project's tests serve.

Data flow: ``grammar`` (seeded text) -> ``corpus`` (tokenizer, padded ids) ->
``model`` + ``generation`` + ``train`` (target, draft on target-written text) ->
``checkpoint`` (files that vLLM loads) -> ``evaluate`` (figures by kind).
"""
