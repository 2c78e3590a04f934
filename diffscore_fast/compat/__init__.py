"""The call signatures of other metrics, answered by this package's scores."""
