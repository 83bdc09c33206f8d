# SPDX-License-Identifier: Apache-2.0
"""Parts of simulate_capacity.py: the engine's loop, its policies, the comparison."""
