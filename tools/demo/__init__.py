# SPDX-License-Identifier: Apache-2.0
"""The demo: serve the bundled checkpoint, sweep the load, compare, report."""
