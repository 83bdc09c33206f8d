# SPDX-License-Identifier: Apache-2.0
"""Worker-side parts of the CPU rehearsal (see ``dspark_cpu_rehearsal``)."""
