"""Runs envs: in a worker process, on a thread, in the caller. Imports no managers and no torch."""
