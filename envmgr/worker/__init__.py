"""The child side: runs the envs of one host. Imports nothing of managers, torch or treetensor."""
