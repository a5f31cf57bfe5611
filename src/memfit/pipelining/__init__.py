"""Pipelining: a step on K devices in M micro-batches, with a plan for each stage."""
