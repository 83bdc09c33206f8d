# SPDX-License-Identifier: Apache-2.0
"""The synthetic world of acceptance that simulator and sweep share."""
