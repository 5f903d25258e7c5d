"""A toy training framework, for the worked example of an adapter."""
