"""What ends a benchmark before or outside a request. Requests that fail do not raise: they are counted."""


class BenchError(Exception):
    """A flag, file or server that cannot be used; its text is the one line shown to the user."""
