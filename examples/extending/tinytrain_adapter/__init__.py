"""The adapter of tinytrain. In the package, this folder is ``holdfast/adapters/tinytrain``."""
