"""The service: scores over HTTP, from one queue in which the requests of all clients meet."""
