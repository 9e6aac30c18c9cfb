"""Hosts in worker processes: how they are started, reached and ended."""
