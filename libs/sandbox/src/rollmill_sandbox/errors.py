"""The error of the sandbox."""


class SandboxError(Exception):
    """No safe sandbox can be built here, or an invalid request. The message has what is missing."""
