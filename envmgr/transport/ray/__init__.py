"""Hosts as actors on a Ray cluster; see docs/decisions/0025."""
