# SPDX-License-Identifier: Apache-2.0
"""The one exception of the demo."""


class DemoError(RuntimeError):
    """A run that cannot give figures; its text is shown to the user as it is."""
