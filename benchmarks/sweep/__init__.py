# SPDX-License-Identifier: Apache-2.0
"""Parts of sweep_concurrency.py: arms, the engine process of an arm, checkpoints."""
