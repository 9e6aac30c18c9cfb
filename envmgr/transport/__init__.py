"""Transports: how hosts are started, spoken to, watched and ended."""
